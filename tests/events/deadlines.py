"""Waiting for what another thread or process does: by looking again, for so long and no longer."""

import threading
import time

TIMEOUT_S = 20.0
"""No test waits as long; it is what a broken one takes to fail."""

LOOK_AGAIN_S = 0.01


def wait_until(is_so, what, timeout_s=TIMEOUT_S):
    """Look until it is so; what is it, for the message."""
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"after {timeout_s:g} s still not {what}"
        pause.wait(LOOK_AGAIN_S)


def wait_for_equal(get, expected, timeout_s=TIMEOUT_S):
    """Look until `get()` is what is expected; the last answer is shown if it never is."""
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while (found := get()) != expected and time.monotonic() < deadline:
        pause.wait(LOOK_AGAIN_S)
    assert found == expected
