"""Authenticated peers that violate the protocol of `TcpBackend`."""

import time
from contextlib import closing

import msgspec
import pytest
from migration.backends.made_links import SECRET, TRANSFER_ID, fill, make_connect, make_rows, read_all
from migration.made_channels import LONG, soon

from kv_pool.errors import (
    MigrationError,
    PeerUnavailableError,
    StaleTransferError,
    TransferFailedError,
)
from kv_pool.migration.backends.tcp import PieceHeader, ReadRuns, Rows, TcpBackend
from kv_pool.migration.channel import BulkListener
from kv_pool.migration.messages import DescribeNode, describe_failure
from kv_pool.migration.remote_calls import CallServer, RemoteCalls

encode = msgspec.msgpack.encode


def make_backend(address, storage=None):
    backend = TcpBackend(storage or make_rows(8, [4096], 0, "x"))
    backend.attach(lambda transfer_id, block_ids: None, make_connect(lambda: address))
    return backend


@pytest.fixture
def source():
    """Yield a channel to the backend of a source with 8 blocks of 4 KiB."""
    backend = make_backend("")
    server = CallServer(
        "127.0.0.1:0",
        SECRET,
        lambda *_: DescribeNode(),
        bulk=BulkListener({"tcp": backend.get_bulk_handler()}),
    )
    with server:
        with closing(RemoteCalls(server.address, SECRET, "reader")) as calls:
            channel = calls.connect_bulk("tcp", LONG)
        yield channel
        channel.close()


@pytest.mark.parametrize(
    "rows", [b"nothing", Rows([]), Rows([4095]), Rows([4097]), Rows([0, 4096]), Rows([8192, -4096])]
)
def test_a_reader_with_other_blocks_is_disconnected(source, rows):
    source.send(rows if isinstance(rows, bytes) else encode(rows), soon())
    with pytest.raises(PeerUnavailableError):
        source.receive(soon())


@pytest.mark.parametrize(
    "runs", [[0], [0, 0], [0, -1], [0, 9], [0, 5, 0, 5], [1, 2**62], [2**62, 1], [1, 2, 3]]
)
def test_malformed_runs_get_no_bytes(source, runs):
    source.send(encode(Rows([4096])), soon())
    source.send(encode(ReadRuns(TRANSFER_ID, runs)), soon())
    try:
        header = msgspec.msgpack.decode(source.receive(soon()), type=PieceHeader)
    except PeerUnavailableError:
        return
    assert header.num_blocks == 0
    assert header.failed.error == "InvalidBlockError"


@pytest.mark.parametrize("runs", [[7, 2], [-1, 1], [8, 1]])
def test_a_read_of_unknown_blocks_fails_and_the_next_works(source, runs):
    source.send(encode(Rows([4096])), soon())
    source.send(encode(ReadRuns(TRANSFER_ID, runs)), soon())
    header = msgspec.msgpack.decode(source.receive(soon()), type=PieceHeader)
    assert (header.num_blocks, header.failed.error) == (0, "InvalidBlockError")
    source.send(encode(ReadRuns(TRANSFER_ID, [3, 1])), soon())
    assert msgspec.msgpack.decode(source.receive(soon()), type=PieceHeader) == PieceHeader(1)
    source.receive_raw([memoryview(bytearray(4096))], soon())
    assert msgspec.msgpack.decode(source.receive(soon()), type=PieceHeader) == PieceHeader(0)


def serve(*said):
    """A source that answers every read with these headers or bytes."""

    def answer(channel, caller):
        channel.receive(soon())
        channel.receive(soon())
        for one in said:
            if isinstance(one, PieceHeader):
                channel.send(encode(one), soon())
            elif isinstance(one, int):
                channel.send_raw([memoryview(bytes(one))], soon())
            else:
                channel.send(one, soon())

    return CallServer("127.0.0.1:0", SECRET, lambda *_: DescribeNode(), bulk=BulkListener({"tcp": answer}))


@pytest.mark.parametrize(
    "said",
    [
        [PieceHeader(0)],
        [PieceHeader(3)],
        [PieceHeader(-1)],
        [b"what?"],
        [],
        [PieceHeader(1), 4096, PieceHeader(0)],
        [PieceHeader(2), 8192, PieceHeader(1)],
        [PieceHeader(2), 5000],
        [PieceHeader(0, describe_failure(MigrationError("no reason")))],
    ],
    ids=[
        "nothing",
        "too much",
        "less than nothing",
        "nonsense",
        "hangs up",
        "half",
        "more",
        "cut off",
        "fails",
    ],
)
def test_a_source_with_a_wrong_answer_fails_the_read(said):
    with serve(*said) as server:
        reader = make_backend(server.address).open("source", encode(Rows([4096])))
        with pytest.raises(TransferFailedError, match="source"):
            reader.read(TRANSFER_ID, [1, 2], [3, 4], time.monotonic() + LONG)
        assert reader.is_settled()
        with pytest.raises(TransferFailedError):
            reader.read(TRANSFER_ID, [1, 2], [3, 4], time.monotonic() + LONG)
        reader.close()


def test_only_requested_blocks_are_written():
    storage = make_rows(8, [4096], 0, "x")
    fill(storage, 1)
    before = read_all(storage)
    with serve(PieceHeader(2), 8192, PieceHeader(2), 8192) as server:
        reader = make_backend(server.address, storage).open("source", encode(Rows([4096])))
        with pytest.raises(TransferFailedError):
            reader.read(TRANSFER_ID, [1, 2], [3, 5], time.monotonic() + LONG)
        reader.close()
    after = read_all(storage)
    assert [block_id for block_id in range(8) if after[block_id] != before[block_id]] == [3, 5]


def test_an_ended_lease_raises_a_stale_transfer_error():
    failed = describe_failure(StaleTransferError("it ended"))
    with serve(PieceHeader(1), 4096, PieceHeader(0, failed)) as server:
        reader = make_backend(server.address).open("source", encode(Rows([4096])))
        with pytest.raises(StaleTransferError, match="it ended"):
            reader.read(TRANSFER_ID, [1, 2], [3, 4], time.monotonic() + LONG)
        reader.close()
