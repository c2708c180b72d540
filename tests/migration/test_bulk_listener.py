"""The port over which backends send bytes: whom it admits, and what strangers can do to it."""

import threading
import time
from contextlib import closing, contextmanager

import pytest
from made_threads import no_new_threads
from migration.made_channels import LONG, count_node_threads, has_ended, soon

from kv_pool.errors import EndpointError, MigrationError, PeerUnavailableError
from kv_pool.migration import channel as channel_module
from kv_pool.migration.addresses import bind_listener, connect_to
from kv_pool.migration.channel import BulkListener, Channel
from kv_pool.migration.messages import DescribeNode
from kv_pool.migration.remote_calls import CallServer, RemoteCalls

SECRET = b"the secret of all nodes"


def send_back(channel, caller):
    """A handler: the caller's name and the reversed bytes of each message."""
    while channel.wait_for_more(LONG):
        channel.send(caller.encode() + channel.receive(soon())[::-1], soon())


@contextmanager
def listen(handler=send_back, port=0, **limits):
    bulk = BulkListener({"backwards": handler}, port)
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(channel_module, name, limit)
        with CallServer("127.0.0.1:0", SECRET, lambda *_: DescribeNode(), bulk=bulk):
            yield bulk


def connect(listener):
    return connect_to(f"127.0.0.1:{listener.port}", LONG)


def open_channel(listener, opened=None):
    opened = opened or listener.admit("backwards", "caller")
    channel = Channel(connect(listener), opened.key, True, "the source")
    channel.send_raw([memoryview(opened.ticket)], soon())
    return channel


def check_works(channel):
    channel.send(b"abcd", soon())
    assert channel.receive(soon()) == b"callerdcba"


def check_serves(listener):
    channel = open_channel(listener)
    check_works(channel)
    channel.close()


def test_a_reader_is_admitted_by_a_call():
    bulk = BulkListener({"backwards": send_back})
    server = CallServer("127.0.0.1:0", SECRET, lambda *_: DescribeNode(), bulk=bulk)
    with server, closing(RemoteCalls(server.address, SECRET, "caller")) as calls:
        channel = calls.connect_bulk("backwards", LONG)
        check_works(channel)
        channel.close()
        with pytest.raises(
            MigrationError, match="no backend 'sideways' that serves bulk data; it has backwards"
        ):
            calls.connect_bulk("sideways", LONG)
    with pytest.raises(PeerUnavailableError):
        calls.connect_bulk("backwards", LONG)


def test_the_port_can_be_chosen():
    with bind_listener("127.0.0.1:0") as free:
        port = free.getsockname()[1]
    with listen(port=port) as listener:
        assert listener.port == port
        with pytest.raises(EndpointError, match="cannot listen"), listen(port=port):
            pass
        check_serves(listener)


def test_a_ticket_admits_one_connection_in_time():
    with listen(TICKET_S=0.2) as listener:
        opened, late = (listener.admit("backwards", "caller") for _ in range(2))
        first = open_channel(listener, opened)
        check_works(first)
        time.sleep(0.21)
        for used in (opened, late):
            with pytest.raises(PeerUnavailableError):
                check_works(open_channel(listener, used))
        check_works(first)
        first.close()


def test_a_ticket_without_its_key_is_of_no_use(caplog):
    asked = []

    def answer(channel, caller):
        asked.append(channel.receive(soon()))

    with listen(answer) as listener:
        opened = listener.admit("backwards", "caller")
        forged = Channel(connect(listener), bytes(32), True, "the source")
        forged.send_raw([memoryview(opened.ticket)], soon())
        with pytest.raises(PeerUnavailableError):
            check_works(forged)
    assert not asked
    assert "without a valid MAC" in caplog.text


@pytest.mark.parametrize("sent", [b"x", bytes(16), b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(100_000)])
def test_a_stranger_is_disconnected(sent):
    with listen() as listener:
        channel = open_channel(listener)
        for _ in range(5):
            with connect(listener) as stranger:
                try:
                    stranger.sendall(sent)
                except ConnectionError:
                    continue
                assert has_ended(stranger)
        check_works(channel)
        channel.close()


def test_silent_strangers_take_no_threads_and_are_replaced():
    with listen(MAX_STRANGERS=3, TICKET_S=LONG) as listener:
        strangers = [connect(listener) for _ in range(8)]
        assert all(map(has_ended, strangers[:5]))
        assert count_node_threads() == 1
        check_serves(listener)
        for stranger in strangers:
            stranger.close()
    with listen(TICKET_S=0.05) as listener, connect(listener) as stranger:
        assert has_ended(stranger)


def test_readers_above_the_limit_get_an_error():
    with listen(MAX_READERS=1) as listener:
        channel = open_channel(listener)
        check_works(channel)
        with pytest.raises(PeerUnavailableError, match="1 connections are open, which is the maximum"):
            listener.admit("backwards", "caller")
        channel.close()


def test_a_reader_without_a_thread_is_disconnected(caplog):
    with listen() as listener:
        with no_new_threads(), pytest.raises(PeerUnavailableError):
            check_works(open_channel(listener))
        assert "the connection of a reader is closed" in caplog.text
        check_serves(listener)


def test_stop_ends_connections_and_threads():
    before = threading.active_count()
    with listen() as listener:
        channel = open_channel(listener)
        check_works(channel)
        stranger = connect(listener)
    assert threading.active_count() == before
    with pytest.raises(PeerUnavailableError):
        check_works(channel)
    assert has_ended(stranger)
    stranger.close()
