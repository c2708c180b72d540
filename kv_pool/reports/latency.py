"""`LatencyWindow`: call latencies, sampled at very low cost."""

from collections import deque
from collections.abc import Callable
from itertools import count

import msgspec

from kv_pool.reports.histogram import CALL_BOUNDS_S, Histogram

TIMED_EVERY = 31
"""One call in this many is timed; a timed call takes 1.5 microseconds longer. A prime, so that sampling does
not align with a periodic caller. Measured by benchmarks/bench_call_timing.py."""

DEFAULT_MAX_KEPT = 1_000


class CallLatency(msgspec.Struct, frozen=True):
    """The latency of one kind of call, in microseconds.

    Attributes:
        num_calls: number of calls, those that raised included.
        num_timed: number of recent calls that the figures are computed from; if 0, all figures are 0.0.
        p99_us: 99th percentile, nearest rank.
    """

    num_calls: int = 0
    num_timed: int = 0
    mean_us: float = 0.0
    median_us: float = 0.0
    p99_us: float = 0.0
    max_us: float = 0.0


class LatencyWindow:
    """The durations of recent calls, one in `TIMED_EVERY`. Callers may use any number of threads.

        started_ns = 0 if window.number_call() % TIMED_EVERY else perf_counter_ns()
        try:
            ...
        finally:
            if started_ns:
                window.note(perf_counter_ns() - started_ns)

    Repeat this code at each call site, because a method around it would double the cost.

    Args:
        max_kept: number of durations to keep; the oldest are dropped.

    Attributes:
        number_call: counts a call and returns its number, starting at 0.
        histogram: all durations that were noted.
    """

    def __init__(self, max_kept: int = DEFAULT_MAX_KEPT) -> None:
        self._durations_ns: deque[int] = deque(maxlen=max_kept)
        self.histogram = Histogram.make(CALL_BOUNDS_S)
        self._num_looks = 0
        # A single C call, so atomic with respect to other threads.
        self.number_call: Callable[[], int] = count().__next__

    def note(self, duration_ns: int) -> None:
        """Record the duration of a call."""
        self._durations_ns.append(duration_ns)
        self.histogram.note(duration_ns / 1e9)

    def count_calls(self) -> int:
        """Return the number of calls so far, also of those that were not timed. One thread at a time."""
        num_calls = self.number_call() - self._num_looks  # reading the counter also increments it
        self._num_looks += 1
        return num_calls

    def summarize(self) -> CallLatency:
        """Return the figures so far. O(max_kept).

        Only one thread may call this at a time; others may time calls meanwhile.
        """
        num_calls, ordered = self.count_calls(), sorted(self._durations_ns)
        if not ordered:
            return CallLatency(num_calls)
        num_timed = len(ordered)
        middle = ordered[(num_timed - 1) // 2] + ordered[num_timed // 2]
        return CallLatency(
            num_calls=num_calls,
            num_timed=num_timed,
            mean_us=sum(ordered) / num_timed / 1000,
            median_us=middle / 2 / 1000,
            p99_us=ordered[-(-num_timed * 99 // 100) - 1] / 1000,
            max_us=ordered[-1] / 1000,
        )
