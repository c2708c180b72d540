"""`measure_curves`: hit rates over capacity, of LRU and of the optimum. `Estimates`: both at any capacity."""

from collections.abc import Sequence
from math import sqrt
from time import perf_counter

import numpy as np

from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.curves.curve_report import CurveCounts, CurvePoint, CurveReport, locate_knee
from kv_pool.lab.curves.lru_curve import LruCurve
from kv_pool.lab.curves.optimum_curve import OptimumCurve
from kv_pool.lab.curves.reuse import Reuse
from kv_pool.lab.curves.sampling import NUM_GROUPS, read_prompts
from kv_pool.lab.report import InfiniteCache, OnProgress, find_share, make_provenance
from kv_pool.lab.settings import ReplaySettings

_NUM_POINTS = 64
_REPORTED = [
    "trace",
    "convention",
    "limit",
    "trace_block_size",
    "timestamp_unit",
    "skip_broken",
    "seed",
    "block_bytes",
]
USED = (*_REPORTED, "num_blocks", "block_size")
"""The settings that decide a curve."""


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


def measure_curves(
    settings: ReplaySettings,
    capacities: Sequence[int] | None = None,
    on_progress: OnProgress | None = None,
    sample_rate: float | None = None,
) -> CurveReport:
    """Measure the hits of LRU and of optimal replacement at several capacities.

    Args:
        settings: the trace and how it is read. `num_blocks` is ignored, and the model is that of the instant
            clock with full attention.
        capacities: in blocks. None: 64 capacities in equal ratios, from the largest request, below which
            pools refuse requests, to the least capacity at which LRU has all hits of an infinite cache.
        on_progress: called with the shares of one part of the work after the other.
        sample_rate: share of the sessions, or roots, from which hits are estimated; None for exact counts.
    Raises:
        TraceError: the trace cannot be read, or its ids do not identify prefixes.
        InvalidArgumentError: a setting has no effect on a curve, a capacity is below 1, the rate is not a
            share, or the sample is too small.

    Cost: reading the trace once; O(pieces * log requests) for LRU at all capacities that refuse no request,
    and the same for each other one; O(pieces) for each capacity of the optimum. `Reuse` explains the pieces.
    """
    why = "it is for one request at a time and full attention; leave the default, or use a sweep"
    settings.check_used(USED, "a curve", why)
    if capacities is not None and (not capacities or min(capacities) < 1):
        raise InvalidArgumentError(
            f"the capacities are {list(capacities)}; a curve needs at least one, each of 1 block or more"
        )
    settings.check()
    most: dict[str, float] = {}

    def notify(doing: str, share: float) -> None:
        most[doing] = max(share, most.get(doing, 0.0))  # admission to a small pool takes a pass more
        if on_progress is not None:
            on_progress(doing, most[doing])

    started = perf_counter()
    trace = settings.open_trace()
    read = read_prompts(trace, lambda share: notify("reading", share), rate=sample_rate)
    read_at = perf_counter()
    read.reuse.on_share = lambda share: notify("LRU", share)
    estimates = Estimates(read.reuse, read.groups, sample_rate or 1.0)
    blocks_looked_up, tokens_in = read.sizes.count_totals()
    sizes = np.sort(read.sizes.list_all("num_blocks"))
    largest = int(max(sizes, default=1))
    if capacities is None:
        capacities = choose_capacities(largest, estimates.lru.find_least_full_capacity())
    capacities = sorted(set(capacities))
    of_lru = [estimates.count_lru(capacity) for capacity in capacities]
    lru_at = perf_counter()
    of_optimum: list[CurveCounts] = []
    read.reuse.on_share = lambda share: notify("optimum", (len(of_optimum) + share) / len(capacities))
    for capacity in capacities:
        of_optimum.append(estimates.count_optimum(capacity))
    optimum_at = perf_counter()
    num_fitting = np.searchsorted(sizes, capacities, "right").tolist()
    points = [
        CurvePoint(capacity, len(sizes) - fitting, lru, optimum)
        for capacity, fitting, lru, optimum in zip(capacities, num_fitting, of_lru, of_optimum, strict=True)
    ]
    return CurveReport(
        block_size=trace.pool_block_size,
        convention=settings.convention,
        requests=len(sizes),
        blocks_looked_up=blocks_looked_up,
        tokens_in=tokens_in,
        largest_request=largest,
        optimum_blocks=estimates.optimum_blocks,
        optimum_tokens=estimates.optimum_tokens,
        infinite_cache=estimates.count_infinite(),
        knee=locate_knee(capacities, [one.token_hit_rate for one in of_lru]),
        points=points,
        sample=read.sample,
        broken_lines=trace.num_broken,
        first_broken=trace.first_broken,
        read_seconds=read_at - started,
        lru_seconds=lru_at - read_at,
        optimum_seconds=optimum_at - lru_at,
        settings={name: value for name, value in settings.describe().items() if name in _REPORTED},
        provenance=make_provenance(trace, trace.digest(), settings.seed),
    )


def choose_capacities(first: int, last: int) -> list[int]:
    """Return at most 64 capacities in equal ratios from `first` to `last`, both included."""
    ratio = max(first, last) / first
    return sorted({round(first * ratio ** (step / (_NUM_POINTS - 1))) for step in range(_NUM_POINTS)})
