"""Authenticated peers that violate the protocol of `TcpBackend`."""

import time
from contextlib import closing, contextmanager

import msgspec
import pytest
from made_threads import no_new_threads
from migration.backends.made_links import (
    SECRET,
    TRANSFER_ID,
    fill,
    make_connect,
    make_rows,
    read_all,
    serve_bulk,
)
from migration.made_channels import LONG, count_node_threads, soon, wait_until

from kv_pool import threads
from kv_pool.errors import (
    InvalidArgumentError,
    InvalidBlockError,
    KVPoolError,
    MigrationError,
    PeerUnavailableError,
    StaleTransferError,
    TransferFailedError,
)
from kv_pool.migration.backends.tcp import TcpBackend
from kv_pool.migration.bulk_listener import BulkListener
from kv_pool.migration.messages import Acknowledged, OpenBulk, ReadBlocks
from kv_pool.migration.remote_calls import CallServer, RemoteCalls

encode = msgspec.msgpack.encode


def make_backend(address, storage=None):
    backend = TcpBackend(storage or make_rows(8, [4096], 0, "x"))
    backend.attach(lambda transfer_id, block_ids: None, make_connect(lambda: address))
    return backend


@pytest.fixture
def calls():
    """Yield calls to a source with 8 blocks of 4 KiB."""
    with (
        serve_bulk(make_backend("")) as server,
        closing(RemoteCalls(server.address, SECRET, "reader")) as made,
    ):
        yield made


@pytest.mark.parametrize("rows", [b"nothing", [], [4095], [4097], [0, 4096], [8192, -4096]])
def test_a_reader_with_other_blocks_is_not_admitted(calls, rows):
    with pytest.raises((MigrationError, InvalidArgumentError), match="blocks"):
        calls.connect_bulk(OpenBulk("tcp", rows if isinstance(rows, bytes) else encode(rows)), LONG)


@pytest.mark.parametrize("block_ids", [[7, 8], [-1], [8], [2**62], [2**63], [0] * 9, [1.5], "all"])
def test_a_read_of_unknown_blocks_fails(calls, block_ids):
    bulk = calls.connect_bulk(OpenBulk("tcp", encode([4096])), LONG)
    with pytest.raises((InvalidBlockError, MigrationError)):
        calls.call(ReadBlocks(bulk.ticket, TRANSFER_ID, block_ids), LONG)
    with pytest.raises(PeerUnavailableError), closing(bulk.channel):
        bulk.channel.receive([memoryview(bytearray(1))], time.monotonic() + 0.05)


@contextmanager
def serve(num_bytes, error=None):
    """A source that answers every read with bytes, and then perhaps an error."""

    def send(channel, transfer_id, block_ids):
        channel.send([memoryview(bytes(num_bytes))], soon())
        if error is not None:
            raise error

    with CallServer(
        "127.0.0.1:0", SECRET, lambda *_: Acknowledged(), bulk=BulkListener({"tcp": lambda told: send})
    ) as server:
        yield server


@pytest.mark.parametrize("num_bytes", [0, 4096, 5000, 8192, 9000])
@pytest.mark.parametrize("kind", [MigrationError, StaleTransferError, ZeroDivisionError])
def test_the_error_of_a_source_fails_the_read(num_bytes, kind):
    with serve(num_bytes, kind("no reason")) as server:
        reader = make_backend(server.address).open("source", encode([4096]))
        expected = StaleTransferError if kind is StaleTransferError else TransferFailedError
        with pytest.raises(expected, match="no reason"):
            reader.read(TRANSFER_ID, [1, 2], [3, 4], soon())
        assert reader.is_settled()
        assert not reader.is_usable()
        with pytest.raises(TransferFailedError, match="source"):
            reader.read(TRANSFER_ID, [1, 2], [3, 4], soon())
        reader.close()


def test_a_read_without_a_thread_at_the_source_fails_at_once(monkeypatch):
    """It was refused without a word on the connection of the bytes, and so lasted until its deadline."""
    monkeypatch.setattr(threads, "_IDLE_S", 0.0)
    with serve(8192) as server:
        reader = make_backend(server.address).open("source", encode([4096]))
        wait_until(lambda: count_node_threads() == 1)
        with no_new_threads(), pytest.raises(TransferFailedError, match="limit of threads"):
            reader.read(TRANSFER_ID, [1, 2], [3, 4], soon())


def test_a_source_that_sends_too_little_is_late():
    with serve(8191) as server:
        reader = make_backend(server.address).open("source", encode([4096]))
        with pytest.raises(TransferFailedError, match="in time"):
            reader.read(TRANSFER_ID, [1, 2], [3, 4], time.monotonic() + 0.1)
        reader.close()


def test_only_requested_blocks_are_written():
    storage = make_rows(8, [4096], 0, "x")
    fill(storage, 1)
    before = read_all(storage)
    with serve(12288) as server:
        reader = make_backend(server.address, storage).open("source", encode([4096]))
        reader.read(TRANSFER_ID, [1, 2], [3, 5], soon())
        assert not reader.is_usable()
        with pytest.raises(KVPoolError):
            reader.read(TRANSFER_ID, [1, 2], [0, 1], soon())
        reader.close()
    after = read_all(storage)
    assert [block_id for block_id in range(8) if after[block_id] != before[block_id]] == [3, 5]
