"""Start threads, with a helpful error if the system refuses; `Workers`: a small pool; `YieldTimer`."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from kv_pool.errors import OutOfThreadsError

Result = TypeVar("Result")
_IDLE_S = 10.0

WORK_NS = 400_000
REST_S = 50e-6


def start_thread(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """Start a daemon thread that calls `target(*args)`, and return it.

    Raises:
        OutOfThreadsError: the system cannot start another thread. Nothing has changed.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise make_out_of_threads(name, error) from error
    return thread


def submit(executor: Executor, name: str, function: Callable[..., Result], *args: object) -> Future[Result]:
    """Call `function(*args)` in an executor. `name` appears in the error message.

    Raises:
        OutOfThreadsError: the system cannot start another thread. The executor can only be shut down.
    """
    try:
        return executor.submit(function, *args)
    except (RuntimeError, MemoryError) as error:
        raise make_out_of_threads(name, error) from error


def make_out_of_threads(name: str, error: BaseException) -> OutOfThreadsError:
    """Return the error for a thread that the system did not start."""
    return OutOfThreadsError(
        f"no thread could be started for {name!r}: {error}. Raise the limit of threads (ulimit -u, or "
        "the container's pids limit)"
    )


class Workers:
    """An executor that runs work in order of submission on at most `max_threads` daemon threads.

    At interpreter exit `ThreadPoolExecutor` would wait for its threads, and one of these may be waiting for a
    peer. A thread ends after ten seconds without work.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        self._name = name
        self._max_threads = max_threads
        # Locked directly: an exception in `Condition.__enter__` would leave the lock held.
        self._mutex = threading.RLock()
        self._condition = threading.Condition(self._mutex)
        # Apart, because `submit` wakes one waiting thread, which has to be a worker.
        self._became_idle = threading.Condition(self._mutex)
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._is_stopped = False

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` when a thread is free and return its future. After `stop` the future is cancelled.

        Raises:
            OutOfThreadsError: no thread is running, and the system cannot start one. `work` will not run.
        """
        future: Future[Result] = Future()
        with self._mutex:
            if self._is_stopped:
                future.cancel()
                return future
            while self._waiting and self._waiting[-1][0].cancelled():
                self._waiting.pop()
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

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all submitted work has been run or cancelled. Return False after `timeout_s` seconds."""
        with self._mutex:
            return self._became_idle.wait_for(self._is_idle, timeout_s)

    def stop(self) -> None:
        """Cancel the work that has not started; work in progress continues."""
        with self._mutex:
            self._is_stopped = True
            for future, _ in self._waiting:
                future.cancel()
            self._waiting.clear()
            self._condition.notify_all()
            self._became_idle.notify_all()

    def join(self) -> None:
        """Wait for the work in progress, after `stop`."""
        with self._mutex:
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _is_idle(self) -> bool:
        return not self._waiting and self._num_idle == len(self._threads)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._num_idle += 1
                if self._is_idle():
                    self._became_idle.notify_all()
                is_woken = self._condition.wait_for(lambda: self._waiting or self._is_stopped, _IDLE_S)
                self._num_idle -= 1
                if not is_woken or not self._waiting:
                    self._threads.discard(threading.current_thread())
                    if self._is_idle():
                        self._became_idle.notify_all()
                    return
                future, work = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del future, work


class YieldTimer:
    """A timer that sleeps in `yield_if_due` if the last sleep was at least `work_ns` ago.

    Python runs one thread at a time and lets it run for 5 ms (`sys.setswitchinterval`) while others wait. The
    sleep is longer than 0 because a sleep of 0 ends before a waiting thread has woken up.
    """

    def __init__(
        self,
        work_ns: int = WORK_NS,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.work_ns = work_ns
        self._clock_ns = clock_ns
        self._sleep = sleep
        self._worked_since_ns = clock_ns()

    def yield_if_due(self) -> None:
        """Yield the GIL if it is due. Call it every few microseconds of work, without holding a lock."""
        if self._clock_ns() - self._worked_since_ns >= self.work_ns:
            self.yield_now()
            self._worked_since_ns = self._clock_ns()

    def yield_now(self) -> None:
        """Yield the GIL to other threads by sleeping for 50 microseconds."""
        self._sleep(REST_S)
