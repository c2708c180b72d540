"""Pairs of connected channels, and a thread for calls that run in parallel to a test."""

import socket
import threading
import time
from contextlib import contextmanager

from kv_pool.migration.channel import Channel

KEY = b"k" * 32
LONG = 60.0


def soon():
    return time.monotonic() + LONG


@contextmanager
def make_pair():
    """Two connected channels."""
    left, right = socket.socketpair()
    with left, right:
        yield Channel(left, KEY, True, "the right"), Channel(right, KEY, False, "the left")


@contextmanager
def make_end():
    """A channel connected to a raw socket."""
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(LONG)
        yield Channel(left, KEY, True, "the other"), right


def make_frame(*payloads):
    """Return the frames that a channel would send to the channel of `make_end` for these messages."""
    left, right = socket.socketpair()
    with left, right:
        sender = Channel(left, KEY, False, "nobody")
        frames = []
        for payload in payloads:
            sender.send(payload, soon())
            frames.append(right.recv(1 << 16))
        return frames


class Beside:
    """A call in a thread; `get` returns its result or raises its error."""

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
