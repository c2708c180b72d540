"""`RecoveringLock`, `Aborting`: an interrupted call of a pool is completed or undone before the next one."""

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


class Aborting:
    """A context that an exception leaves by way of `abort`, which completes or undoes the call."""

    def __init__(self, abort: Callable[[BaseException], None]) -> None:
        self._abort = abort

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._abort(error)
