"""Polling helpers for conditions that another thread or process makes true, with a time limit."""

import threading
import time

TIMEOUT_S = 20.0
"""Time after which a broken test fails; passing tests wait less."""

LOOK_AGAIN_S = 0.01


def wait_until(is_so, what, timeout_s=TIMEOUT_S):
    """Poll until the condition is true; `what` names it in the error message."""
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"after {timeout_s:g} s still not {what}"
        pause.wait(LOOK_AGAIN_S)


def wait_for_equal(get, expected, timeout_s=TIMEOUT_S):
    """Poll until `get()` returns the expected value; a failure shows the last value."""
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while (found := get()) != expected and time.monotonic() < deadline:
        pause.wait(LOOK_AGAIN_S)
    assert found == expected
