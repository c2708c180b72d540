"""`RecoveringLock`, `Aborting`: an interrupted call of a pool is completed or undone before the next one."""

import os
from _thread import RLock
from collections.abc import Callable
from time import sleep
from typing import Final
from weakref import WeakSet

from kv_pool.errors import ForkedPoolError

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
        is_lost: another thread held the lock when this process was forked. It does not exist here, so nothing
            completes its call and releases the lock.
    """

    __slots__ = ("_recover", "is_lost", "is_unfinished")

    def __init__(self, recover: Callable[[], object]) -> None:
        self._recover = recover
        self.is_unfinished = False
        self.is_lost = False
        _locks.add(self)

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
        if self.is_lost:
            raise ForkedPoolError(
                "another thread was in a call of the pool when this process was forked, so the copy of the "
                "pool in this process is incomplete; make a new pool here, or fork while no thread uses it"
            )
        pause_s = _FIRST_PAUSE_S
        for _ in range(_NUM_TRIES):
            sleep(pause_s)
            if self.acquire(False):
                return
            pause_s *= 2
        self.acquire()


_locks: WeakSet[RecoveringLock] = WeakSet()


def _find_lost_locks() -> None:
    """Run in a forked process, by the thread that forked."""
    for lock in list(_locks):
        if lock.acquire(False):
            lock.release()
        else:
            lock.is_lost = True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_find_lost_locks)


class Aborting:
    """A context manager that calls `abort` with any exception, to complete or undo the call."""

    def __init__(self, abort: Callable[[BaseException], None]) -> None:
        self._abort = abort

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._abort(error)
