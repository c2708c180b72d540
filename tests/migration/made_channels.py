"""Two channels that lead to each other, and a thread for what runs beside the test."""

import select
import socket
import threading
import time
from contextlib import contextmanager

from kv_pool.migration.channel import Channel
from kv_pool.migration.handshake import ClientGreeting

KEYS = (b"a" * 32, b"b" * 32)
LONG = 60.0


def soon():
    return time.monotonic() + LONG


@contextmanager
def make_pair():
    """Both ends as channels."""
    left, right = socket.socketpair()
    with left, right:
        yield Channel(left, *KEYS, "the right"), Channel(right, *reversed(KEYS), "the left")


@contextmanager
def make_end():
    """One end as a channel, the other as a socket that can be given anything."""
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(LONG)
        yield Channel(left, *KEYS, "the other"), right


def make_frame(*payloads):
    """The bytes of these messages, as a channel would send them to the one of `make_end`, in a list."""
    left, right = socket.socketpair()
    with left, right:
        sender = Channel(left, *reversed(KEYS), "nobody")
        frames = []
        for payload in payloads:
            sender.send(payload, soon())
            frames.append(right.recv(1 << 16))
        return frames


def greet_client(connection, secret, deadline, peer):
    """The server's side of a handshake, waited for."""
    greeting = ClientGreeting(connection, secret, peer)
    while (channel := greeting.go_on()) is None:
        assert select.select([connection], [], [], deadline - time.monotonic())[0], "nothing came"
    return channel


class Beside:
    """Runs a call in a thread; `get` gives what it returned, or raises what it raised."""

    def __init__(self, call, *arguments):
        self._outcome = None

        def run():
            try:
                self._outcome = (call(*arguments), None)
            except BaseException as error:
                self._outcome = (None, error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def get(self):
        self._thread.join(LONG)
        assert not self._thread.is_alive(), "it did not end"
        result, error = self._outcome
        if error is not None:
            raise error
        return result

    def get_error(self):
        self._thread.join(LONG)
        assert not self._thread.is_alive(), "it did not end"
        return self._outcome[1]
