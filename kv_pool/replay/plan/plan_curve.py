"""`PlanCurve`: predicted hits of a pool and its lower tiers at any capacity, from one reading of a trace."""

from collections.abc import Callable, Sequence

from kv_pool.replay.curves.lru_curve import LruCurve
from kv_pool.replay.curves.sampling import read_prompts
from kv_pool.replay.settings import ReplaySettings
from kv_pool.replay.trace import Trace


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
        settings: the trace, how it is read, and the clock.
        trace: the opened trace.
        block_size: tokens per block.
        on_progress: called with the share of the trace that is read, after every 100 requests.
    Raises:
        TraceError: the trace cannot be read, or its ids do not identify prefixes.

    Attributes:
        requests, tokens_in: number of requests and of prompt tokens.
        largest_request: blocks of the largest request. Smaller pools refuse requests.
        span_ms: time from the first to the last arrival, on the replay's clock.
        num_distinct: number of distinct blocks that are cached.
        full_capacity: the least capacity that has all hits of a cache without evictions.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        trace: Trace,
        block_size: int,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        has_output = settings.clock == "trace"
        read = read_prompts(
            settings, trace, block_size, None, on_progress or (lambda share: None), has_output=has_output
        )
        reuse = read.reuse
        self.requests, self.tokens_in = len(reuse), read.tokens_in
        self.block_size = block_size
        self.span_ms = read.span_ms / (settings.rates.speedup if has_output else 1.0)
        self.largest_request = reuse.largest_request
        self.num_distinct = reuse.num_distinct + read.num_generated
        self._num_cacheable = sum(reuse.num_cacheable)
        self._lru = LruCurve(reuse)
        self.full_capacity = self._lru.find_least_full_capacity()

    def count_tokens(self, capacity: int) -> int:
        """Return the prompt tokens that are hits in `capacity` blocks."""
        return self._lru.count_hits(capacity)[1]

    def find_rate(self, capacity: int) -> float:
        """Return the token hit rate of `capacity` blocks."""
        return self.count_tokens(capacity) / self.tokens_in

    def find_capacity(self, token_hit_rate: float) -> int | None:
        """Return the least capacity that refuses no request and has this hit rate; None if none has it."""
        low, high = self.largest_request, self.full_capacity
        if self.find_rate(high) < token_hit_rate:
            return None
        while low < high:
            middle = (low + high) // 2
            if self.find_rate(middle) < token_hit_rate:
                low = middle + 1
            else:
                high = middle
        return low

    def combine(self, num_blocks: int, tiers: Sequence[int]) -> int:
        """Return the capacity of a pool without tiers that has as many hits as this pool with its tiers."""
        combined = num_blocks
        for tier in tiers:
            combined = self._add_tier(combined, tier)
        return combined

    def _add_tier(self, above: int, tier: int) -> int:
        hits_above = self._lru.count_hits(above)[0]
        num_placed = self._num_cacheable - hits_above
        low, high = above, above + tier
        while low < high:
            middle = (low + high + 1) // 2
            share = (self._lru.count_hits(middle)[0] - hits_above) / num_placed if num_placed else 0.0
            if middle <= above + tier - share * min(above, tier):
                low = middle
            else:
                high = middle - 1
        return low
