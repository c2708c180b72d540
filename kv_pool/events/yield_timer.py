"""`YieldTimer`: yield the GIL at intervals during long work, so that other threads can run."""

import time
from collections.abc import Callable

WORK_NS = 400_000
REST_S = 50e-6


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
