"""`Tally`: counts and times while a replay runs, and the report at its end."""

import time
from array import array
from dataclasses import dataclass

import numpy as np

from kv_pool.manager.cached_prefix import CachedPrefix
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.replay.keeper import Keeper
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.replay_tiers import ReplayTiers
from kv_pool.replay.report import ReplayReport, summarize_calls, summarize_waits
from kv_pool.replay.request_outcomes import OutcomeNotes
from kv_pool.tiers.tier_hit import TierHit


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """How much of a prompt need not be computed.

    Attributes:
        prefix: on the device.
        tier_hit: what tiers have after it; None for nothing.
    """

    prefix: CachedPrefix
    tier_hit: TierHit | None = None

    @property
    def num_tokens(self) -> int:
        if self.tier_hit is None:
            return self.prefix.num_tokens
        return self.prefix.num_tokens + self.tier_hit.num_tokens


class Tally:
    """Drives the manager for a clock, timing each call, and counts what came of it.

    Args:
        keeper: the manager's, if it has a retention.
        tiers: below the manager's pool, if there are some.
        outcomes: collects what became of each request; None for counts alone.

    Attributes:
        report: counts so far; rates and times are filled in by `finish`.
        smallest_refused: blocks that the smallest refused request needs.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        report: ReplayReport,
        keeper: Keeper | None = None,
        tiers: ReplayTiers | None = None,
        outcomes: OutcomeNotes | None = None,
    ) -> None:
        self.manager = manager
        self.report = report
        self.smallest_refused = 0
        self.tiers = tiers
        self._keeper = keeper
        self._outcomes = outcomes
        if tiers is not None:
            report.tiers = tiers.reports
        self._waits_ms = array("d")
        self._look_up_ns = array("q")
        self._allocate_ns = array("q")
        self._free_ns = array("q")
        self._sum_request_hit_rates = 0.0
        self._num_tables = 0
        self._num_table_blocks = 0
        self._num_runs = 0
        self._started = time.perf_counter()

    def count_request(self, request: ReplayRequest, num_tokens: int) -> bool:
        """Count an arrival that will have `num_tokens` in the end; False if it is refused since it would not
        fit alone."""
        report = self.report
        num_blocks_alone = self.manager.count_most_blocks(num_tokens)
        report.requests += 1
        report.tokens_in += request.input_length
        report.blocks_looked_up += request.num_cacheable_blocks
        if self._outcomes is not None:
            self._outcomes.arrive(request)
        if num_blocks_alone <= report.num_blocks:
            return True
        report.refused_requests += 1
        if self._outcomes is not None:
            self._outcomes.refuse(request)
        if not self.smallest_refused or num_blocks_alone < self.smallest_refused:
            self.smallest_refused = num_blocks_alone
        return False

    def count_hit(self, request: ReplayRequest, found: FoundPrefix) -> None:
        """Count the prefix with which a request was admitted for the first time.

        Of a hit block that is not full only the tokens count.
        """
        report = self.report
        num_tokens = min(found.num_tokens, request.input_length)
        report.blocks_hit += found.num_tokens // report.block_size
        report.tokens_hit += num_tokens
        self._sum_request_hit_rates += num_tokens / request.input_length
        if self.tiers is not None and found.tier_hit is not None:
            self.tiers.count_hit(found.tier_hit, found.num_tokens - num_tokens)
        if self._outcomes is not None:
            num_in_tiers = max(0, num_tokens - found.prefix.num_tokens)
            self._outcomes.count_hit(request, found.num_tokens // report.block_size, num_tokens, num_in_tiers)

    def look_up(self, request: ReplayRequest) -> FoundPrefix:
        """What of the request's prompt is cached, on the device and then in tiers."""
        start = time.perf_counter_ns()
        prefix = self.manager.get_computed_blocks(request, request.max_hit_tokens)
        found = FoundPrefix(prefix)
        if self.tiers is not None:
            hit = self.tiers.find(request, prefix)
            if hit.num_tokens:
                found = FoundPrefix(prefix, hit)
        self._look_up_ns.append(time.perf_counter_ns() - start)
        return found

    def begin(self, request: ReplayRequest, num_new_tokens: int, found: FoundPrefix) -> bool:
        """Whether the request got slots for what was found and for so many more tokens: only where all its
        tokens have room, if nobody else takes it. What tiers have is being read then."""
        if self.tiers is None or found.tier_hit is None:
            return self.allocate(request, num_new_tokens, found.prefix)
        start = time.perf_counter_ns()
        has_room = self.tiers.begin(request, found.tier_hit, found.prefix, num_new_tokens)
        self._end_allocation(start)
        return has_room

    def allocate(
        self, request: ReplayRequest, num_new_tokens: int, prefix: CachedPrefix | None = None
    ) -> bool:
        """Whether the request got slots for so many more tokens. With a prefix it is about to begin: only
        where all its tokens have room, if nobody else takes it."""
        start = time.perf_counter_ns()
        has_room = (
            self.manager.allocate_slots(
                request, num_new_tokens, prefix, full_sequence_must_fit=prefix is not None
            )
            is not None
        )
        self._end_allocation(start)
        return has_room

    def _end_allocation(self, start_ns: int) -> None:
        self._allocate_ns.append(time.perf_counter_ns() - start_ns)
        # A step of its own: what is allocated next is computed after it, and may begin with what it writes.
        self.manager.take_block_copies()
        in_use = self.num_blocks_in_use
        if in_use > self.report.peak_blocks_in_use:
            self.report.peak_blocks_in_use = in_use

    def free(self, request: ReplayRequest) -> None:
        """Give the request's blocks back, after looking how contiguous they were."""
        for group_id in range(len(self.manager.groups)):
            block_ids = np.asarray(self.manager.get_block_ids(request.request_id, group_id))
            block_ids = block_ids[np.flatnonzero(block_ids)]  # 0 is the null block
            if len(block_ids):
                self._num_table_blocks += len(block_ids)
                self._num_runs += 1 + int(np.count_nonzero(np.diff(block_ids) != 1))
        start = time.perf_counter_ns()
        self.manager.free(request)
        self._free_ns.append(time.perf_counter_ns() - start)

    def count_preemption(self, request: ReplayRequest) -> None:
        """Count that a running request has lost its blocks."""
        self.report.preempted += 1
        if self._outcomes is not None:
            self._outcomes.count_preemption(request)

    def end(self, request: ReplayRequest, waited_ms: float = 0.0, end_ms: float | None = None) -> None:
        """Release the blocks of a request that has ended, or keep some of them.

        Args:
            waited_ms: what it waited for blocks, in all.
            end_ms: when it ended; None for its arrival.
        """
        if self._keeper is not None:
            self._keeper.keep(request)
        num_blocks_before = self._num_table_blocks
        self.free(request)
        if self._outcomes is not None:
            num_blocks = self._num_table_blocks - num_blocks_before
            end_ms = request.arrival_ms if end_ms is None else end_ms
            self._outcomes.end(request, num_blocks, waited_ms, end_ms)

    def set_time(self, now_ms: float) -> None:
        """It is so late; earlier times are passed over."""
        if self._keeper is not None:
            self._keeper.now_ms = max(self._keeper.now_ms, now_ms)

    def count_wait(self, wait_ms: float) -> None:
        """Count what a request that has ended waited for blocks, in all."""
        self._waits_ms.append(wait_ms)

    @property
    def num_blocks_in_use(self) -> int:
        return self.report.num_blocks - self.manager.get_num_free_blocks()

    @property
    def token_hit_rate(self) -> float:
        return self.report.tokens_hit / self.report.tokens_in if self.report.tokens_in else 0.0

    def finish(self, mean_blocks_in_use: float) -> ReplayReport:
        """Fill in what follows from the counts."""
        report = self.report
        report.wall_seconds = time.perf_counter() - self._started
        report.token_hit_rate = self.token_hit_rate
        if report.blocks_looked_up:
            report.block_hit_rate = report.blocks_hit / report.blocks_looked_up
        if report.requests:
            report.mean_request_token_hit_rate = self._sum_request_hit_rates / report.requests
        if self._num_runs:
            report.blocks_per_run = self._num_table_blocks / self._num_runs
        report.mean_blocks_in_use = mean_blocks_in_use
        report.evictions = self.manager.block_pool.num_evictions
        report.waiting = summarize_waits(self._waits_ms)
        report.look_up = summarize_calls(self._look_up_ns)
        report.allocate = summarize_calls(self._allocate_ns)
        report.free = summarize_calls(self._free_ns)
        if self.tiers is not None:
            self.tiers.fill_reports()
        return report
