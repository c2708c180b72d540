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
from kv_pool.migration.backends.tcp import ReadBlocks, Rows, TcpBackend
from kv_pool.migration.channel import BulkListener
from kv_pool.migration.messages import (
    Acknowledged,
    CallFailed,
    Cancelled,
    DescribeNode,
    decode_message,
    describe_failure,
    encode_message,
)
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


@pytest.mark.parametrize("block_ids", [[0] * 9, [2**63], [1.5], "all"])
def test_malformed_requests_get_no_bytes(source, block_ids):
    source.send(encode(Rows([4096])), soon())
    source.send(encode({"transfer_id": TRANSFER_ID, "block_ids": block_ids}), soon())
    try:
        failed = decode_message(source.receive(soon()))
    except PeerUnavailableError:
        return
    assert failed.error == "InvalidBlockError"


@pytest.mark.parametrize("block_ids", [[7, 8], [-1], [8], [2**62]])
def test_a_read_of_unknown_blocks_fails_and_the_next_works(source, block_ids):
    source.send(encode(Rows([4096])), soon())
    source.send(encode(ReadBlocks(TRANSFER_ID, block_ids)), soon())
    assert decode_message(source.receive(soon())).error == "InvalidBlockError"
    source.send(encode(ReadBlocks(TRANSFER_ID, [3])), soon())
    assert decode_message(source.receive(soon())) == Acknowledged()
    source.receive_raw([memoryview(bytearray(4096))], soon())
    assert decode_message(source.receive(soon())) == Acknowledged()


def serve(*said):
    """A source that answers every read with these headers or bytes."""

    def answer(channel, caller):
        channel.receive(soon())
        channel.receive(soon())
        for one in said:
            if isinstance(one, Acknowledged | Cancelled | CallFailed):
                channel.send(encode_message(one), soon())
            elif isinstance(one, int):
                channel.send_raw([memoryview(bytes(one))], soon())
            else:
                channel.send(one, soon())

    return CallServer("127.0.0.1:0", SECRET, lambda *_: DescribeNode(), bulk=BulkListener({"tcp": answer}))


@pytest.mark.parametrize(
    "said",
    [
        [],
        [b"what?"],
        [Cancelled()],
        [Acknowledged()],
        [Acknowledged(), 4096],
        [Acknowledged(), 5000],
        [Acknowledged(), 8192],
        [Acknowledged(), 8192, b"what?"],
        [Acknowledged(), 12288, Acknowledged()],
        [describe_failure(MigrationError("no reason"))],
        [Acknowledged(), 8192, describe_failure(MigrationError("no reason"))],
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
    with serve(Acknowledged(), 12288, Acknowledged()) as server:
        reader = make_backend(server.address, storage).open("source", encode(Rows([4096])))
        with pytest.raises(TransferFailedError):
            reader.read(TRANSFER_ID, [1, 2], [3, 5], time.monotonic() + LONG)
        reader.close()
    after = read_all(storage)
    assert [block_id for block_id in range(8) if after[block_id] != before[block_id]] == [3, 5]


def test_an_ended_lease_raises_a_stale_transfer_error():
    failed = describe_failure(StaleTransferError("it ended"))
    with serve(Acknowledged(), 8192, failed) as server:
        reader = make_backend(server.address).open("source", encode(Rows([4096])))
        with pytest.raises(StaleTransferError, match="it ended"):
            reader.read(TRANSFER_ID, [1, 2], [3, 4], time.monotonic() + LONG)
        reader.close()
