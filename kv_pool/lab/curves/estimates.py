"""`Estimates`: the rates of both curves at any capacity, with the standard errors of a sample."""

from collections.abc import Sequence
from math import sqrt

from kv_pool.lab.curves.curve_report import CurveCounts
from kv_pool.lab.curves.lru_curve import LruCurve
from kv_pool.lab.curves.optimum_curve import OptimumCurve
from kv_pool.lab.curves.reuse import Reuse
from kv_pool.lab.curves.sampling import NUM_GROUPS
from kv_pool.lab.report import InfiniteCache, find_share


class Estimates:
    """The curves of a trace, exact, or estimated from a sample.

    Args:
        reuse: the pieces of the trace or of the sample.
        groups: the pieces of disjoint parts of the sample; at least 2, or none for the whole trace.
        rate: share of the trace's conversations in the sample; 1 for the whole trace.

    The standard error is that of a ratio estimator from independent groups (Cochran, "Sampling techniques",
    1977). It is too small where the curve is steep and few conversations of the sample are active at a time:
    their number then varies more than in the trace, which blurs the estimated stack distances.

    Attributes:
        lru, optimum: the curves of `reuse`.
        optimum_blocks, optimum_tokens: as in `CurveReport`: "optimal", or "bound".
    """

    def __init__(self, reuse: Reuse, groups: Sequence[Reuse] = (), rate: float = 1.0) -> None:
        self.lru = LruCurve(reuse, rate)
        self.optimum = OptimumCurve(reuse, rate)
        is_optimal = self.optimum.is_prefix_closed
        self.optimum_blocks = "optimal" if is_optimal else "bound"
        self.optimum_tokens = "optimal" if is_optimal and self.optimum.has_optimal_tokens else "bound"
        self._reuse = reuse
        self._totals = reuse.sizes.count_totals()
        self._groups = [Estimates(group, rate=rate / NUM_GROUPS) for group in groups]

    def count_lru(self, capacity: int) -> CurveCounts:
        """Return the hits of LRU in `capacity` blocks."""
        of_groups = [group.count_lru(capacity) for group in self._groups]
        return self._make_counts(self.lru.count_hits(capacity), of_groups)

    def count_optimum(self, capacity: int) -> CurveCounts:
        """Return the block hits of the optimum in `capacity` blocks, and the bound of its token hits."""
        num_blocks, _ = self.optimum.count_hits(capacity)
        of_groups = [group.count_optimum(capacity) for group in self._groups]
        return self._make_counts((num_blocks, self.optimum.bound_tokens(capacity)), of_groups)

    def count_infinite(self) -> InfiniteCache:
        """Return the hits of a cache that never evicts."""
        found = InfiniteCache(
            self._reuse.num_distinct, *self.lru.count_hits(self.lru.find_least_full_capacity())
        )
        found.set_rates(*self._totals)
        return found

    def _make_counts(self, hits: tuple[int, int], of_groups: list[CurveCounts]) -> CurveCounts:
        """Return hits with their rates, and the standard errors that the counts of groups give."""
        counts = CurveCounts(*hits, *map(find_share, hits, self._totals))
        if not of_groups:
            return counts
        blocks = tokens = 0.0  # variances
        for group, found in zip(self._groups, of_groups, strict=True):
            of_blocks, of_tokens = map(find_share, group._totals, self._totals)
            blocks += (of_blocks * (found.block_hit_rate - counts.block_hit_rate)) ** 2
            tokens += (of_tokens * (found.token_hit_rate - counts.token_hit_rate)) ** 2
        correction = len(of_groups) / (len(of_groups) - 1)
        counts.block_rate_error = sqrt(correction * blocks)
        counts.token_rate_error = sqrt(correction * tokens)
        return counts
