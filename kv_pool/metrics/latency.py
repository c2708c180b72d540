"""`LatencyWindow`: how long calls take, from a sample that costs next to nothing."""

from collections import deque
from collections.abc import Callable
from itertools import count

import msgspec

TIMED_EVERY = 31
"""One call in so many is timed: it takes a microsecond and a half longer. A prime, so that no habit of a
caller falls in step with it. What it costs: benchmarks/bench_call_timing.py."""

DEFAULT_MAX_KEPT = 1_000


class CallLatency(msgspec.Struct, frozen=True):
    """How long one kind of call takes, in microseconds.

    Attributes:
        num_calls: all of them, those that raised as well.
        num_timed: of the last ones, how many the figures are about; all figures are 0.0 where it is 0.
        p99_us: nearest rank.
    """

    num_calls: int = 0
    num_timed: int = 0
    mean_us: float = 0.0
    median_us: float = 0.0
    p99_us: float = 0.0
    max_us: float = 0.0


class LatencyWindow:
    """The times of the last calls, one in `TIMED_EVERY`, for callers of any number of threads.

        started_ns = 0 if window.number_call() % TIMED_EVERY else perf_counter_ns()
        try:
            ...
        finally:
            if started_ns:
                window.note(perf_counter_ns() - started_ns)

    Written out where the call is, since a method in between costs as much again.

    Args:
        max_kept: how many times are remembered; older ones are forgotten.

    Attributes:
        number_call: counts a call and answers its number, the first one's is 0.
        note: remembers how many nanoseconds a call took.
    """

    def __init__(self, max_kept: int = DEFAULT_MAX_KEPT) -> None:
        self._durations_ns: deque[int] = deque(maxlen=max_kept)
        self._num_looks = 0
        # One step of C each, which no other thread divides.
        self.number_call: Callable[[], int] = count().__next__
        self.note: Callable[[int], None] = self._durations_ns.append

    def summarize(self) -> CallLatency:
        """The figures so far. One thread at a time, whatever others time meanwhile. O(max_kept)."""
        # To look at the counter is to count.
        num_calls = self.number_call() - self._num_looks
        self._num_looks += 1
        return summarize(num_calls, list(self._durations_ns))


def summarize(num_calls: int, durations_ns: list[int]) -> CallLatency:
    """The figures of so many calls, of which these durations are known."""
    if not durations_ns:
        return CallLatency(num_calls)
    ordered = sorted(durations_ns)
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
