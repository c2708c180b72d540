"""`Pace`: long work in small pieces, so that other threads of the process are not held up by it."""

import time
from collections.abc import Callable

WORK_NS = 400_000
REST_S = 50e-6


class Pace:
    """Rests where `step` is called, once the last rest is `work_ns` ago.

    Python runs one thread at a time and lets a working one go on for 5 ms (`sys.setswitchinterval`) though
    others wait. A rest is a real sleep: one of no length ends before a waiting thread is awake to take over.
    """

    def __init__(
        self,
        work_ns: int = WORK_NS,
        rest_s: float = REST_S,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.work_ns = work_ns
        self.rest_s = rest_s
        self._clock_ns = clock_ns
        self._sleep = sleep
        self._worked_since_ns = clock_ns()

    def step(self) -> None:
        """Rest if it is time to. Call it every few microseconds of work, holding no lock."""
        if self._clock_ns() - self._worked_since_ns >= self.work_ns:
            self.rest()
            self._worked_since_ns = self._clock_ns()

    def rest(self) -> None:
        """Let others run."""
        self._sleep(self.rest_s)
