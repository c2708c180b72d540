"""`RecoveringLock`, `Aborting`: an interrupted call of a pool is completed or undone before the next one."""

from _thread import RLock
from collections.abc import Callable
from time import sleep
from typing import Final

_NUM_TRIES: Final = 8
_FIRST_PAUSE_S: Final = 50e-6  # a shorter one ends before a thread that waits for the GIL gets it


class RecoveringLock(RLock):  # type: ignore[misc]  # final in typeshed, not in CPython
    """The reentrant lock of a pool, for `with`: completes an interrupted call before the next one.

    A waiting thread polls for 13 ms before it blocks. Each release of an RLock wakes a blocked thread, which
    cannot run until it gets the GIL: either it takes the lock from the running thread, which then has to
    wait, or it finds the lock taken again. Both may cost more than a call of the pool. A sleeping thread
    costs the others nothing, and takes the lock only while it runs.

    Args:
        recover: called on entry, with the lock held, while `is_unfinished`; it resets that.

    Attributes:
        is_unfinished: a call was interrupted, and so was its completion.
    """

    __slots__ = ("_recover", "is_unfinished")

    def __init__(self, recover: Callable[[], object]) -> None:
        self._recover = recover
        self.is_unfinished = False

    def __enter__(self) -> bool:  # type: ignore[override]  # without RLock's arguments
        # CPython runs signal handlers, which may raise, on entry to a plain function, at a backward jump and
        # after a call of a C function. Between the acquisition and the end of this method these points are
        # all inside the `try`. There is none between `except` and `release`, nor in `__exit__`, which is
        # RLock's.
        try:
            if not self.acquire(False):
                self._wait()
            if self.is_unfinished:
                self._recover()
        except BaseException:
            # A reentrant acquisition has succeeded; a first one may have failed, and `release` then raises.
            try:  # noqa: SIM105 (a handler may run before `suppress`)
                self.release()
            except RuntimeError:
                pass
            raise
        return True

    def _wait(self) -> None:
        pause_s = _FIRST_PAUSE_S
        for _ in range(_NUM_TRIES):
            sleep(pause_s)
            if self.acquire(False):
                return
            pause_s *= 2
        self.acquire()


class Aborting:
    """A context manager that calls `abort` with any exception, to complete or undo the call."""

    def __init__(self, abort: Callable[[BaseException], None]) -> None:
        self._abort = abort

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._abort(error)
