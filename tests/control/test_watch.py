"""`Watch` in a real server: one reading for all clients, slow clients, heartbeats, and the end."""

import asyncio
import contextlib
import socket
import threading
import time
from collections import Counter

import pytest
from adapter.made_pool import make, take

from kv_pool.control import watch
from kv_pool.control.connections import Connections
from kv_pool.control.watch import Watch


class Readings:
    """Reads a pool and counts how often; stops while `may_read` is not set."""

    def __init__(self, padding):
        self.pool = make(16)
        self.count = 0
        self.may_read = threading.Event()
        self.may_read.set()
        self._padding = " " * padding

    async def __call__(self):
        while not self.may_read.is_set():
            await asyncio.sleep(0.01)
        self.count += 1
        return f'{{"free": {self.pool.get_statistics().free_blocks}}}{self._padding}'.encode()


class Served:
    """A watch of a pool of 16 blocks, served at a port of its own."""

    def __init__(self, interval_s=0.02, padding=0, timeout_s=10.0):
        self.readings = Readings(padding)
        self.watch = Watch({"view": (self.readings, interval_s)})
        self.refusals = Counter()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._connections = Connections(self.watch, self.refusals, 64, timeout_s, self._listener)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)

    def __enter__(self):
        self._thread.start()
        self.loop.call_soon_threadsafe(self._connections.start)
        return self

    def __exit__(self, *_):
        self.stop_watch()
        asyncio.run_coroutine_threadsafe(self._connections.close(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
        self._listener.close()

    def stop_watch(self):
        asyncio.run_coroutine_threadsafe(self.watch.stop(), self.loop).result(10)

    @contextlib.contextmanager
    def connect(self, receive_bytes=None):
        """Ask for the stream and yield a function that receives until it has seen a text."""
        with socket.socket() as client:
            if receive_bytes is not None:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            client.settimeout(5)
            client.connect(self._listener.getsockname())
            client.sendall(b"GET / HTTP/1.1\r\nHost: pool\r\n\r\n")
            yield lambda text=None: receive_until(client, text)

    def wait_until_alone(self):
        until = time.monotonic() + 5
        while self.watch._clients:
            assert time.monotonic() < until
            time.sleep(0.01)


def receive_until(client, text):
    """Return what is received until `text` has arrived; for None until the end."""
    received = b""
    while text is None or text not in received:
        part = client.recv(1 << 16)
        if not part:
            assert text is None, received
            break
        received += part
    return received


def test_all_clients_share_one_reading_which_is_made_only_while_they_watch():
    with Served(interval_s=60) as served:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(served.connect()) for _ in range(20)]
            for receive in clients:
                head = receive(b'event: view\ndata: {"free": 16}\n\n')
                assert b"content-type: text/event-stream" in head
            assert served.readings.count == 1
        served.wait_until_alone()
        take(served.readings.pool, 1, 6)
        with served.connect() as receive:  # a reading of its own, not one of then
            receive(b'{"free": 10}')
    assert served.readings.count == 2


def test_a_pool_that_changes_is_seen_to_change():
    with Served() as served, served.connect() as receive:
        receive(b'{"free": 16}')
        take(served.readings.pool, 1, 6)
        receive(b'{"free": 10}')


def test_a_client_that_does_not_read_is_disconnected_and_delays_no_other():
    with Served(padding=1 << 20, timeout_s=0.5) as served, served.connect(receive_bytes=4096):
        with served.connect() as receive:
            for number in range(3):
                take(served.readings.pool, number, 1)
                receive(b'{"free": %d}' % (15 - number))
        served.wait_until_alone()
        assert served.refusals == {"unread": 1}


def test_while_a_reading_waits_for_the_pool_clients_hear_that_the_server_lives(monkeypatch):
    monkeypatch.setattr(watch, "HEARTBEAT_S", 0.05)
    with Served() as served:
        served.readings.may_read.clear()
        with served.connect() as receive:
            for _ in range(3):
                assert b"data" not in receive(b": alive\n\n")
            served.readings.may_read.set()
            receive(b'{"free": 16}')


@pytest.mark.parametrize("interval_s", [0.01, 60])
def test_a_stop_ends_each_stream_with_its_last_chunk(interval_s):
    with Served(interval_s) as served:
        with served.connect() as receive:
            receive(b'{"free": 16}')
            served.stop_watch()
            assert receive(b"0\r\n\r\n").endswith(b"0\r\n\r\n")
        with served.connect() as receive:  # too late
            assert b"data" not in receive(b"0\r\n\r\n")
