"""`Workers`: a small pool of daemon threads, started on demand."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kv_pool.errors import OutOfThreadsError
from kv_pool.threads import start_thread

_Result = TypeVar("_Result")
_IDLE_S = 10.0


class Workers:
    """An executor that runs work in order of submission on at most `max_threads` daemon threads.

    At interpreter exit `ThreadPoolExecutor` would wait for its threads, and one of these may be waiting for a
    peer. A thread ends after ten seconds without work.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._condition = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._is_stopped = False

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Run `work` when a thread is free and return its future. After `stop` the future is cancelled.

        Raises:
            OutOfThreadsError: no thread is running, and the system cannot start one. `work` will not run.
        """
        future: Future[_Result] = Future()
        with self._condition:
            if self._is_stopped:
                future.cancel()
                return future
            self._waiting.append((future, work))
            if self._num_idle >= len(self._waiting) or len(self._threads) == self._max_threads:
                self._condition.notify()
                return future
            try:
                self._threads.add(start_thread(self._name, self._run))
            except OutOfThreadsError:
                if not self._threads:  # otherwise one of them takes it
                    self._waiting.pop()
                    raise
        return future

    def stop(self) -> None:
        """Cancel the work that has not started; work in progress continues."""
        with self._condition:
            self._is_stopped = True
            for future, _ in self._waiting:
                future.cancel()
            self._waiting.clear()
            self._condition.notify_all()

    def join(self) -> None:
        """Wait for the work in progress, after `stop`."""
        with self._condition:
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._num_idle += 1
                is_woken = self._condition.wait_for(lambda: self._waiting or self._is_stopped, _IDLE_S)
                self._num_idle -= 1
                if not is_woken or not self._waiting:
                    self._threads.discard(threading.current_thread())
                    return
                future, work = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, work
