"""`RecoveringLock`: the lock of a pool with an interrupted call, which is completed before the next one."""

from collections.abc import Callable
from threading import RLock


class RecoveringLock:
    """Takes the place of a pool's lock while a call of the pool is unfinished.

    Args:
        lock: the pool's own.
        recover: called with the lock held; completes the call, if that is still to be done.
    """

    def __init__(self, lock: RLock, recover: Callable[[], None]) -> None:
        self._lock = lock
        self._recover = recover

    def __enter__(self) -> bool:
        with self._lock:
            self._recover()
            return self._lock.__enter__()

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        self._lock.release()
