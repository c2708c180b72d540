"""`PlanCurve`: predicted hits of a pool and its lower tiers, and the capacities that they suggest."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.capacity import ModelKV
from kv_pool.lab.curves.curve_report import locate_knee
from kv_pool.lab.curves.lru_curve import LruCurve
from kv_pool.lab.curves.measure import choose_capacities
from kv_pool.lab.curves.sampling import read_prompts
from kv_pool.lab.plan.plan_report import PlanGoal, PlanPoint, Prices
from kv_pool.lab.report import find_share
from kv_pool.lab.settings import ReplayTrace

_GIB = 2**30
_MS_PER_HOUR = 3_600_000
_MORE = 0.1


class PlanCurve:
    """The predicted hits of LRU.

    With the instant clock, the prediction for a pool equals its replay, to the integer. With the trace clock,
    generated blocks are part of the curve: they are cached and age like those of prompts. Requests that run
    at the same time need no further allowance: on average, the requests that still run when a request ends
    are as many as those that started while it ran (Little's law), so the mean stack distance is that of one
    request at a time. This holds while no request waits for blocks.

    A lower tier also keeps blocks that the pool has loaded from it, so a pool of N blocks with a tier of M
    has fewer than N + M different blocks. Predicted are N + M - f * min(N, M), where f is the share of the
    blocks placed in the pool that come from the tier, and likewise for each further tier.

    Args:
        trace: the trace with its settings, of which the clock decides whether requests overlap.
        model: for the bytes of blocks.
        on_progress: called with the share of the work: first the reading, then the pass over the requests.
    Raises:
        TraceError: the trace cannot be read, or its ids do not identify prefixes.

    Attributes:
        requests, tokens_in: number of requests and of prompt tokens.
        largest_request: blocks of the largest request. Smaller pools refuse requests.
        block_bytes: size of a block.
        span_hours: time from the first to the last arrival, on the replay's clock.
        num_distinct: number of distinct blocks that are cached.
        full_capacity: the least capacity that has all hits of a cache without evictions.
        capacities: at most 64 in equal ratios, from the largest request to `full_capacity`.
        knee: the capacity that `locate_knee` finds among them; None if there is none.
    """

    def __init__(
        self,
        trace: ReplayTrace,
        model: ModelKV,
        on_progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        has_output = trace.settings.clock == "trace"
        read = read_prompts(trace, lambda share: on_progress(share / 2), has_output=has_output)
        reuse = read.reuse
        reuse.on_share = lambda share: on_progress((1 + share) / 2)
        self.requests = len(reuse)
        self._num_cacheable, self.tokens_in = reuse.sizes.count_totals()
        self.block_size = trace.pool_block_size
        self.block_bytes = model.count_block_bytes(self.block_size)
        span_ms = read.span_ms / (trace.settings.rates.speedup if has_output else 1.0)
        self.span_hours = span_ms / _MS_PER_HOUR
        self.largest_request = reuse.largest_request
        self.num_distinct = reuse.num_distinct
        self._lru = LruCurve(reuse)
        self.full_capacity = self._lru.find_least_full_capacity()
        self.capacities = choose_capacities(self.largest_request, self.full_capacity)
        self.knee = locate_knee(self.capacities, [self.find_rate(capacity) for capacity in self.capacities])
        reuse.on_share = lambda share: None  # other passes are for single numbers

    def count_tokens(self, capacity: int) -> int:
        """Return the prompt tokens that are hits in `capacity` blocks."""
        return self._lru.count_hits(capacity)[1]

    def find_rate(self, capacity: int) -> float:
        """Return the token hit rate of `capacity` blocks."""
        return self.count_tokens(capacity) / self.tokens_in

    def find_capacity(self, token_hit_rate: float) -> int | None:
        """Return the least capacity that refuses no request and has this hit rate; None if none has it."""
        if self.find_rate(self.full_capacity) < token_hit_rate:
            return None
        smaller = range(self.largest_request, self.full_capacity)
        return self.largest_request + bisect_left(smaller, token_hit_rate, key=self.find_rate)

    def combine(self, num_blocks: int, tiers: Sequence[int]) -> int:
        """Return the capacity of a pool without tiers that has as many hits as this pool with its tiers."""
        combined = num_blocks
        for tier in tiers:
            combined = self._add_tier(combined, tier)
        return combined

    def _add_tier(self, above: int, tier: int) -> int:
        hits_above = self._lru.count_hits(above)[0]
        num_placed = self._num_cacheable - hits_above

        def is_too_large(combined: int) -> bool:
            share = find_share(self._lru.count_hits(combined)[0] - hits_above, num_placed)
            return combined > above + tier - share * min(above, tier)

        return above + bisect_left(range(above + 1, above + tier + 1), True, key=is_too_large)

    def find_goal(self, goal: PlanGoal, least: int = 0) -> int:
        """Return the capacity in blocks for a goal. Without a knee, it is the one that has all hits.

        Args:
            least: the smallest capacity among which prices choose.
        Raises:
            InvalidArgumentError: no capacity has the hit rate, the memory is too small for the largest
                request, or the trace has no arrival times, which prices need.
        """
        if goal.target_hit_rate is not None:
            found = self.find_capacity(goal.target_hit_rate)
            if found is None:
                full = self.full_capacity
                raise InvalidArgumentError(
                    f"no capacity has a token hit rate of {goal.target_hit_rate:.2%}: without evictions the "
                    f"trace has {self.find_rate(full):.2%}, from {self.measure_pool(full) / _GIB:,.2f} GiB "
                    f"({full:,} blocks) on; choose a target up to that"
                )
            return found
        if goal.memory_bytes is not None:
            return self._find_memory(goal.memory_bytes)
        if goal.prices is not None:
            if not self.span_hours:
                raise InvalidArgumentError(
                    "all requests of the trace arrive at the same time, so it has no tokens per hour, which "
                    "prices need; use timestamps, or another goal"
                )
            prices = goal.prices
            return max(  # the smallest of equal ones, as they ascend
                sorted({max(capacity, least) for capacity in self.capacities}),
                key=lambda capacity: self._find_profit(
                    capacity, self.measure_pool(capacity), prices, prices.gpu
                ),
            )
        return self.knee or self.full_capacity

    def choose_tier(
        self, num_blocks: int, tiers: Sequence[int], multiple: int, prices: Prices | None, price: float | None
    ) -> int:
        """Return the capacity in blocks of a tier below `num_blocks` blocks and `tiers`.

        With prices it is the one at which savings minus costs are largest, or 0 if the tier has no price.
        Otherwise it is `multiple` times the pool, at most the capacity that has all hits, and 0 if the blocks
        above the tier have all hits.
        """
        full = self.full_capacity
        if prices is None:
            above = self.combine(num_blocks, tiers)
            return 0 if above >= full else min(multiple * num_blocks, full)
        if price is None:
            return 0
        return max(
            [0, *choose_capacities(1, full)],
            key=lambda tier: self._find_profit(
                self.combine(num_blocks, [*tiers, tier]), tier * self.block_bytes, prices, price
            ),
        )

    def save_per_hour(self, num_tokens: int, prices: Prices) -> float:
        """Return what these hits of the whole trace save in an hour, on average."""
        return num_tokens * prices.prefill / 1e6 / self.span_hours

    def _find_profit(self, capacity: int, memory_bytes: int, prices: Prices, price: float) -> float:
        """Return what the hits in `capacity` blocks save in an hour, without the cost of this memory."""
        return self.save_per_hour(self.count_tokens(capacity), prices) - price * memory_bytes / _GIB

    def measure_pool(self, num_blocks: int) -> int:
        """Return the bytes of a pool, with its null block."""
        return (num_blocks + 1) * self.block_bytes

    def make_point(self, num_blocks: int) -> PlanPoint:
        """Return what the curve says about a capacity."""
        rate = self.find_rate(num_blocks)
        more = grow(num_blocks)
        gained = 100 * (self.find_rate(more) - rate)
        left = self.tokens_in - self.count_tokens(num_blocks)
        return PlanPoint(
            num_blocks=num_blocks,
            memory_bytes=self.measure_pool(num_blocks),
            token_hit_rate=rate,
            points_per_gib=gained / ((more - num_blocks) * self.block_bytes / _GIB),
            prefill_speedup=self.tokens_in / left if left else None,
        )

    def _find_memory(self, memory_bytes: int) -> int:
        largest = self.largest_request
        num_blocks = max(0, memory_bytes // self.block_bytes - 1)
        if num_blocks < largest:
            raise InvalidArgumentError(
                f"{memory_bytes / _GIB:,.2f} GiB hold {num_blocks:,} blocks of {self.block_size} "
                f"tokens besides the null block, and the largest request needs {largest:,}; use at least "
                f"{self.measure_pool(largest) / _GIB:,.2f} GiB, or fewer bytes per element"
            )
        return num_blocks


def grow(num_blocks: int) -> int:
    """Return a capacity that is 10 % larger, by at least one block."""
    return max(num_blocks + 1, round(num_blocks * (1 + _MORE)))


def shrink(num_blocks: int) -> int:
    """Return a capacity that is 10 % smaller."""
    return round(num_blocks * (1 - _MORE))
