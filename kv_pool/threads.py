"""Start threads, with a helpful error if the system refuses."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from kv_pool.errors import OutOfThreadsError

Result = TypeVar("Result")


def start_thread(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """Start a daemon thread that calls `target(*args)`, and return it.

    Raises:
        OutOfThreadsError: the system cannot start another thread. Nothing has changed.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise _make_error(name, error) from error
    return thread


def submit(executor: Executor, name: str, function: Callable[..., Result], *args: object) -> Future[Result]:
    """Call `function(*args)` in an executor. `name` appears in the error message.

    Raises:
        OutOfThreadsError: the system cannot start another thread. The executor can only be shut down.
    """
    try:
        return executor.submit(function, *args)
    except (RuntimeError, MemoryError) as error:
        raise _make_error(name, error) from error


def _make_error(name: str, error: BaseException) -> OutOfThreadsError:
    return OutOfThreadsError(
        f"no thread could be started for {name!r}: {error}. Raise the limit of threads (ulimit -u, or "
        "the container's pids limit)"
    )
