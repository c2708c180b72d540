"""`Histogram`: counts of durations between fixed bounds, as monitoring systems add them up."""

from bisect import bisect_left
from collections.abc import Iterator

import msgspec

CALL_BOUNDS_S = (*(float(f"{digit}e{power}") for power in range(-6, 0) for digit in (1, 2, 5)), 1.0)
"""Bounds for calls of a pool: microseconds, and a second for one that waits for a lock."""

_SECONDS, _MINUTES = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30), (1, 2, 5, 10, 20, 30, 60, 120, 240)
AGE_BOUNDS_S = (*map(float, _SECONDS), *(60.0 * minutes for minutes in _MINUTES))
"""Bounds for the ages of cached blocks: from a step of an engine to hours."""


class Histogram(msgspec.Struct):
    """The number of durations up to each bound. Numbers only grow.

        >>> from kv_pool.reports.histogram import Histogram
        >>> waits = Histogram.make((0.1, 1.0))
        >>> for seconds in (0.05, 0.1, 3.0):
        ...     waits.note(seconds)
        >>> waits.counts, waits.count
        ([2, 0, 1], 3)

    Attributes:
        bounds_s: upper bounds in seconds, ascending; a duration equal to a bound is below it.
        counts: durations up to the first bound, between it and the second, and so on; the last is above all.
        sum_s: sum of the durations.
    """

    bounds_s: tuple[float, ...]
    counts: list[int]
    sum_s: float = 0.0

    @classmethod
    def make(cls, bounds_s: tuple[float, ...]) -> "Histogram":
        """Return an empty histogram."""
        return cls(bounds_s, [0] * (len(bounds_s) + 1))

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self.counts)

    def note(self, seconds: float) -> None:
        """Add a duration. O(log bounds)."""
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds

    def copy(self) -> "Histogram":
        """Return a copy, which does not change."""
        return Histogram(self.bounds_s, list(self.counts), self.sum_s)

    def iter_cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield each bound as text, the last is "+Inf", with the number of durations up to it."""
        num_below = 0
        for bound, count in zip((*map(repr, self.bounds_s), "+Inf"), self.counts, strict=True):
            num_below += count
            yield bound, num_below
