"""`PoolLock`: the reentrant lock of a `GPUKVPool`."""

import os
from _thread import RLock
from contextlib import suppress
from time import sleep
from typing import Final
from weakref import WeakSet

from kv_pool.errors import ForkedPoolError

_NUM_TRIES: Final = 8
_FIRST_PAUSE_S: Final = 50e-6  # a shorter one ends before a thread that waits for the GIL gets it


class PoolLock(RLock):  # type: ignore[misc]  # final in typeshed, not in CPython
    """The reentrant lock of a pool, for `with`.

    A waiting thread polls for 13 ms before it blocks. Each release of an RLock wakes a blocked thread, which
    cannot run until it gets the GIL: either it takes the lock from the running thread, which then has to
    wait, or it finds the lock taken again. Both may cost more than a call of the pool. A sleeping thread
    costs the others nothing, and takes the lock only while it runs.

    Attributes:
        is_lost: another thread held the lock when this process was forked. It does not exist here, so nothing
            completes its call and releases the lock.
    """

    __slots__ = ("is_lost",)

    def __init__(self) -> None:
        self.is_lost = False
        _locks.add(self)

    def __enter__(self) -> bool:  # type: ignore[override]  # without RLock's arguments
        # CPython runs signal handlers, which may raise, on entry to a plain function, at a backward jump and
        # after a call of a C function: after the acquisition only inside the `try`. `__exit__` is RLock's.
        is_entered = False
        try:
            if not self.acquire(False):
                self._wait()
            is_entered = True
        finally:
            if not is_entered:
                # A reentrant acquisition has succeeded; after a failed first one `release` raises.
                with suppress(RuntimeError):
                    self.release()
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


_locks: WeakSet[PoolLock] = WeakSet()


def _find_lost_locks() -> None:
    """Run in a forked process, by the thread that forked."""
    for lock in list(_locks):
        if lock.acquire(False):
            lock.release()
        else:
            lock.is_lost = True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_find_lost_locks)
