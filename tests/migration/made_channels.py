"""Pairs of connected channels, and a thread for calls that run in parallel to a test."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from kv_pool.migration.channel import Channel

_executor = ThreadPoolExecutor()
LONG = 60.0


def soon():
    return time.monotonic() + LONG


@contextmanager
def make_pair():
    """Two connected channels."""
    left, right = socket.socketpair()
    with left, right:
        yield Channel(left, "the right"), Channel(right, "the left")


def has_ended(connection):
    connection.settimeout(LONG)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # its last bytes were not read
        return True


def wait_until(condition):
    """Poll until the condition is true; the timeout only ends a test that hangs."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it never came to be"


def count_node_threads():
    return sum(thread.name.startswith("kv_pool node") for thread in threading.enumerate())


def beside(call, *arguments):
    """Run a call in a thread, in parallel to the test; return its future."""
    return _executor.submit(call, *arguments)
