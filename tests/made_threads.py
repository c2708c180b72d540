"""A system that cannot start more threads."""

import threading
from contextlib import contextmanager


@contextmanager
def no_new_threads():
    """Make every start of a thread fail: the system cannot allocate a stack of 32 TiB."""
    before = threading.stack_size(1 << 45)
    try:
        yield
    finally:
        threading.stack_size(before)


def call_without_threads(function, *args):
    with no_new_threads():
        function(*args)
