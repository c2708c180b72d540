"""The port over which backends send bytes: whom it admits, and what strangers can do to it."""

import threading
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
from migration.made_channels import LONG, beside, count_node_threads, has_ended, make_pair, soon, wait_until
from migration.made_nodes import Clock

from kv_pool.errors import EndpointError, MigrationError, PeerUnavailableError, StaleTransferError
from kv_pool.migration import bulk_listener
from kv_pool.migration.addresses import bind_listener, connect_to
from kv_pool.migration.bulk_listener import IDLE_S, TICKET_S, BulkListener, _Reader
from kv_pool.migration.channel import Channel
from kv_pool.migration.messages import Acknowledged, DescribeNode, OpenBulk, ReadBlocks
from kv_pool.migration.remote_calls import CallServer, RemoteCalls

SECRET = b"the secret of all nodes"
OPEN = OpenBulk("numbers", b"0123456789")
MANY = 1 << 24


def make_sender(description):
    """A backend that sends bytes of the reader's description, and `MANY` zeros for -1."""

    def send(channel, transfer_id, block_ids):
        if transfer_id == b"stale":
            raise StaleTransferError("it has ended")
        for number in block_ids:
            data = bytes(MANY) if number < 0 else description[number : number + 1]
            channel.send([memoryview(data)], soon())

    return send


@contextmanager
def listen(port=0, **limits):
    bulk = BulkListener({"numbers": make_sender}, port)
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(bulk_listener, name, limit)
        server = CallServer("127.0.0.1:0", SECRET, lambda *_: DescribeNode(), bulk=bulk)
        with server, closing(RemoteCalls(server.address, SECRET, "caller")) as calls:
            yield bulk, calls
            for _ in range(2):
                server.stop()
                assert server.address == ""


def connect(listener):
    return connect_to(f"127.0.0.1:{listener.port}", LONG)


def read(calls, bulk, block_ids=(3, 5), transfer_id=b"t"):
    """Read some numbers: the reply, and the bytes if it is one."""
    reply = calls.call(ReadBlocks(bulk.ticket, transfer_id, list(block_ids)), LONG)
    data = bytearray(len(block_ids))
    bulk.channel.receive([memoryview(data)], soon())
    return reply, data


def check_works(calls, bulk):
    assert read(calls, bulk) == (Acknowledged(), b"35")


def check_serves(calls):
    bulk = calls.connect_bulk(OPEN, LONG)
    check_works(calls, bulk)
    bulk.channel.close()


def test_a_reader_is_admitted_by_a_call():
    with listen() as (_, calls):
        bulk = calls.connect_bulk(OPEN, LONG)
        for _ in range(3):
            check_works(calls, bulk)
        bulk.channel.close()
        with pytest.raises(
            MigrationError, match="no backend 'sideways' that serves bulk data; it has numbers"
        ):
            calls.connect_bulk(OpenBulk("sideways", b""), LONG)
    with pytest.raises(PeerUnavailableError):
        calls.connect_bulk(OPEN, LONG)


def test_the_port_can_be_chosen():
    with bind_listener("127.0.0.1:0") as free:
        port = free.getsockname()[1]
    with listen(port=port) as (listener, calls):
        assert listener.port == port
        with pytest.raises(EndpointError, match="cannot listen"), listen(port=port):
            pass
        check_serves(calls)


def test_a_ticket_admits_one_connection_in_time():
    with listen(TICKET_S=0.2, _LOOK_S=LONG) as (listener, calls):
        used, late = calls.connect_bulk(OPEN, LONG), calls.call(OPEN, LONG)
        check_works(calls, used)
        time.sleep(0.21)
        for opened in (used, late):
            with connect(listener) as connection:
                connection.sendall(opened.ticket)
                assert has_ended(connection)
        with pytest.raises(PeerUnavailableError, match="has not arrived"):
            calls.call(ReadBlocks(late.ticket, b"t", [1]), LONG)
        check_works(calls, used)
        used.channel.close()


def test_a_read_waits_for_its_connection():
    with listen(TICKET_S=2 * LONG) as (listener, calls):
        opened = calls.call(OPEN, LONG)
        waiting = beside(calls.call, ReadBlocks(opened.ticket, b"t", [7]), LONG)
        with connect(listener) as connection:
            wait_until(lambda: any(reader.is_reading for reader in listener._readers.values()))
            with pytest.raises(MigrationError, match="another read"):
                calls.call(ReadBlocks(opened.ticket, b"t", [1]), LONG)
            connection.sendall(opened.ticket)
            assert connection.recv(1) == b"7"
            assert waiting.result(LONG) == Acknowledged()
    with listen(TICKET_S=0.05) as (_, calls):
        opened = calls.call(OPEN, LONG)
        with pytest.raises(PeerUnavailableError):
            calls.call(ReadBlocks(opened.ticket, b"t", [7]), LONG)


def test_a_ticket_of_another_node_is_of_no_use():
    with listen() as (_, calls):
        bulk = calls.connect_bulk(OPEN, LONG)
        others = RemoteCalls(calls.address, SECRET, "other")
        with closing(others), pytest.raises(PeerUnavailableError, match="no connection of node 'other'"):
            read(others, bulk)
        check_works(calls, bulk)
        bulk.channel.close()


def test_a_failed_read_ends_its_connection():
    with listen() as (listener, calls):
        bulk = calls.connect_bulk(OPEN, LONG)
        with pytest.raises(StaleTransferError, match="it has ended"):
            read(calls, bulk, transfer_id=b"stale")
        assert has_ended(bulk.channel.connection)
        bulk.channel.close()
        wait_until(lambda: not listener._readers)
        check_serves(calls)


def test_a_reader_that_leaves_makes_room():
    with listen() as (listener, calls):
        check_serves(calls)
        wait_until(lambda: not listener._readers)


def test_a_connection_is_idle_only_between_reads():
    clock = Clock()
    with listen(time=SimpleNamespace(monotonic=clock)) as (listener, calls):
        bulk = calls.connect_bulk(OPEN, LONG)
        wait_until(lambda: all(reader.channel for reader in listener._readers.values()))
        clock.now += TICKET_S + 1
        calls.call(DescribeNode(), LONG)
        finish = calls.begin(ReadBlocks(bulk.ticket, b"t", [-1]), bulk.channel, soon())
        clock.now += IDLE_S + 1
        calls.call(DescribeNode(), LONG)
        bulk.channel.receive([memoryview(bytearray(MANY))], soon())
        assert finish(soon()) == Acknowledged()
        clock.now += 1
        calls.call(DescribeNode(), LONG)
        check_works(calls, bulk)
        clock.now += IDLE_S + 1
        assert has_ended(bulk.channel.connection)
        bulk.channel.close()


def test_a_connection_in_use_is_closed_by_its_user():
    with make_pair() as (channel, _):
        reader = _Reader("caller", None, 0.0, channel, is_reading=True)
        reader.close()
        assert channel.connection.fileno() >= 0
        with pytest.raises(PeerUnavailableError):
            channel.send([memoryview(b"x")], soon())
        reader.is_reading = False
        reader.close()
        assert channel.connection.fileno() == -1


def test_stopped_readers_delay_no_other_call():
    with listen(MAX_READERS=80) as (_, calls):
        readers = [calls.connect_bulk(OPEN, LONG) for _ in range(70)]
        under_way = []
        deadline = time.monotonic() + LONG / 3  # before the sender's own
        for bulk in readers:
            under_way.append(calls.begin(ReadBlocks(bulk.ticket, b"t", [-1])))
            bulk.channel.receive([memoryview(bytearray(1))], deadline)
        assert calls.call(DescribeNode(), LONG / 3) == DescribeNode()
        check_serves(calls)
        for bulk, finish in zip(readers, under_way, strict=True):
            bulk.channel.close()
            with pytest.raises(PeerUnavailableError):
                finish(soon())


@pytest.mark.parametrize("sent", [b"x", bytes(16), b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(100_000)])
def test_a_stranger_is_disconnected(sent):
    with listen() as (listener, calls):
        bulk = calls.connect_bulk(OPEN, LONG)
        for _ in range(5):
            with connect(listener) as stranger:
                try:
                    stranger.sendall(sent)
                except ConnectionError:
                    continue
                assert has_ended(stranger)
        check_works(calls, bulk)
        bulk.channel.close()


def test_silent_strangers_take_no_threads_and_are_replaced():
    with listen(MAX_STRANGERS=3, TICKET_S=LONG) as (listener, calls):
        strangers = [connect(listener) for _ in range(8)]
        assert all(map(has_ended, strangers[:5]))
        assert count_node_threads() == 1
        check_serves(calls)
        for stranger in strangers:
            stranger.close()
    with listen(TICKET_S=0.05) as (listener, _), connect(listener) as stranger:
        assert has_ended(stranger)


def test_readers_above_the_limit_get_an_error():
    with listen(MAX_READERS=1) as (_, calls):
        bulk = calls.connect_bulk(OPEN, LONG)
        with pytest.raises(PeerUnavailableError, match="1 connections are open, which is the maximum"):
            calls.call(OPEN, LONG)
        check_works(calls, bulk)
        bulk.channel.close()


def test_readers_without_reads_do_not_slow_other_calls(monkeypatch):
    with listen() as (_, calls):
        bulk, looks, begun_s = calls.connect_bulk(OPEN, LONG), [], time.monotonic()
        monkeypatch.setattr(Channel, "is_quiet", lambda channel: looks.append(channel) is None)
        for _ in range(100):
            calls.call(DescribeNode(), LONG)
        assert len(looks) <= (time.monotonic() - begun_s) / bulk_listener._LOOK_S + 2
        bulk.channel.close()


def test_stop_ends_connections_reads_and_threads():
    before = threading.active_count()
    with listen() as (listener, calls):
        idle, reading = calls.connect_bulk(OPEN, LONG), calls.connect_bulk(OPEN, LONG)
        check_works(calls, idle)
        finish = calls.begin(ReadBlocks(reading.ticket, b"t", [-1]))
        reading.channel.receive([memoryview(bytearray(1))], soon())
        stranger = connect(listener)
    assert threading.active_count() == before
    for connection in (idle.channel.connection, stranger):
        assert has_ended(connection)
        connection.close()
    with pytest.raises(PeerUnavailableError):
        reading.channel.receive([memoryview(bytearray(MANY))], soon())
    with pytest.raises(PeerUnavailableError):
        finish(soon())
    reading.channel.close()
