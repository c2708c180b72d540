"""`lock_socket`: let one server at a time check a socket's path and create its socket there."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kv_pool.errors import ControlError
from kv_pool.regular_files import open_private

_PAUSE_S = 0.01


@contextmanager
def lock_socket(
    path: Path,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[None]:
    """Hold the lock of the socket at `path` within a `with` block.

    Without it, two servers that replace a dead server's socket could remove each other's. The lock is on a
    file beside the socket, `.NAME.lock`, that only this user can open; any user with read access could lock
    the folder itself.

    Args:
        timeout_s: seconds to wait for another process of this user that holds the lock.
        clock, sleep: in seconds.
    Raises:
        ControlError: the file belongs to another user or cannot be created, or the wait timed out.
    """
    name = f".{path.name}.lock"
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        place = path.parent / name
        deadline_s = clock() + timeout_s
        while (lock := _take_lock(folder, place)) is None:
            if clock() > deadline_s:
                raise ControlError(
                    f"{place}: another server of yours holds this lock; stop it, or choose another socket"
                )
            sleep(_PAUSE_S)
        try:
            yield
        finally:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            os.close(lock)
    finally:
        os.close(folder)


def _take_lock(folder: int, place: Path) -> int | None:
    """Return the descriptor of the locked file; None if another process holds the lock."""
    try:
        lock = open_private(place.name, os.O_RDWR | os.O_CREAT, folder)
    except OSError as error:
        raise ControlError(
            f"{place}: cannot be locked: {error.strerror}. Remove it, or choose a socket with --socket in "
            "a folder that only you can write to"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(place.name, dir_fd=folder).st_ino == os.fstat(lock).st_ino:
            return lock
    except OSError as error:  # held, or removed by its last holder before it was locked here
        if error.errno not in (errno.EWOULDBLOCK, errno.ENOENT):
            os.close(lock)
            raise
    os.close(lock)
    return None
