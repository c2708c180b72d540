"""Start a thread, or raise an error that says what to do."""

import threading
from collections.abc import Callable

from kv_pool.errors import OutOfThreadsError


def start_thread(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """Start a daemon thread that calls `target(*args)`; it does not keep the process from ending.

    Raises:
        OutOfThreadsError: the system starts no more threads. Nothing has changed.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise OutOfThreadsError(
            f"no thread could be started for {name!r}: {error}. Raise the limit of threads (ulimit -u, or "
            "the container's pids limit)"
        ) from error
    return thread
