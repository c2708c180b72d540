"""Signals that end a command: SIGINT (Ctrl-C), SIGTERM and SIGHUP, the same in every sub-command.

The first one unwinds the command, which cleans up sockets, files, workers and the terminal; the exit status
is 128 + the signal's number. Later signals are ignored. A command that still runs `GRACE_S` after the first,
for example because a thread does not end, is terminated without further cleanup.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

GRACE_S = 0.7
"""Seconds for cleanup. Including the interpreter's exit, a command ends within a second."""

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

_SHOW_CURSOR_AND_CLEAR_LINE = b"\x1b[?25h\r\x1b[2K"


class EndedBySignal(SystemExit):
    """Raised in the main thread by a signal. It passes `except Exception`, click and asyncio unchanged."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number
        super().__init__(self.status)


def end_on_signals() -> None:
    """Install the handlers; call once, in the main thread. A SIGHUP that nohup ignores stays ignored."""
    for number in SIGNALS:
        if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _raise)


@contextmanager
def defer_signals() -> Iterator[int]:
    """Yield a file descriptor that becomes readable at the first signal, instead of raising an exception.

    For commands that start and stop threads: an exception in between would leave a thread running.
    Raises:
        EndedBySignal: at the end of the `with` block, if a signal arrived in it.
    """
    readable, writable = os.pipe()
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        _bound(number)
        arrived.append(number)
        os.write(writable, b".")

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield readable
    finally:
        if not arrived:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        os.close(readable)
        os.close(writable)
    if arrived:
        raise EndedBySignal(arrived[0])


def exit_at_once(status: int) -> NoReturn:
    """Exit the process after the cleanup, without waiting for threads and without freeing a large pool."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    _bound(number)
    raise EndedBySignal(number)


def _bound(number: int) -> None:
    """Ignore further signals, and terminate the process after `GRACE_S` in any case.

    This uses an alarm, not a thread: a handler may run while the interpreter holds locks that are needed to
    start a thread.
    """
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, lambda *_: _end_now(number))
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)


def _end_now(number: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed and stream.isatty():
            os.write(stream.fileno(), _SHOW_CURSOR_AND_CLEAR_LINE)
            break
    os._exit(128 + number)
