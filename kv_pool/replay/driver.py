"""`ReplayDriver`: what a clock calls of a manager, its tiers and its host pool, timed and counted."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kv_pool.manager.cached_prefix import CachedPrefix
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.replay.host_swap import HostSwap
from kv_pool.replay.keeper import Keeper
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.replay_tiers import ReplayTiers
from kv_pool.replay.report import ReplayReport
from kv_pool.replay.tally import Tally
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


class ReplayDriver:
    """One replay's manager and its companions.

        receive -> look_up -> begin -> finish_reading -> allocate, step by step -> end
                      ^                                    |  preempt
                      |____________________________________|

    Args:
        tally: counts what the calls do.
        keeper: the manager's, if it has a retention.
        tiers: below the manager's pool; None for no tiers.
        swap: copies preempted requests to the host where its rule says so; None to compute all of them again.
        clock_ns: nanoseconds, for the durations of calls.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        tally: Tally,
        *,
        keeper: Keeper | None = None,
        tiers: ReplayTiers | None = None,
        swap: HostSwap | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.manager = manager
        self.tally = tally
        self.tiers = tiers
        self.swap = swap
        self._keeper = keeper
        self._clock_ns = clock_ns
        if tiers is not None:
            tally.report.tiers = tiers.reports

    @property
    def num_blocks_in_use(self) -> int:
        return self.tally.report.num_blocks - self.manager.get_num_free_blocks()

    def set_time(self, now_ms: float) -> None:
        """Set the time of the retention; a time before the last one is ignored."""
        if self._keeper is not None:
            self._keeper.now_ms = max(self._keeper.now_ms, now_ms)

    def receive(self, request: ReplayRequest, num_tokens: int) -> bool:
        """Count an arrival that will have `num_tokens` in the end; False if it would not fit alone."""
        return self.tally.count_arrival(request, self.manager.count_most_blocks(num_tokens))

    def look_up(self, request: ReplayRequest) -> FoundPrefix:
        """Find what of the request's prompt is cached, on the device and then in tiers."""
        start = self._clock_ns()
        prefix = self.manager.get_computed_blocks(request, request.max_hit_tokens)
        found = FoundPrefix(prefix)
        if self.tiers is not None:
            hit = self.tiers.find(request, prefix)
            if hit.num_tokens:
                found = FoundPrefix(prefix, hit)
        self.tally.look_up_ns.append(self._clock_ns() - start)
        return found

    def count_hit(self, request: ReplayRequest, found: FoundPrefix) -> None:
        """Count the prefix with which a request was admitted for the first time."""
        self.tally.count_hit(request, found.num_tokens, found.prefix.num_tokens)
        if self.tiers is not None and found.tier_hit is not None:
            self.tiers.count_hit(found.tier_hit, max(0, found.num_tokens - request.input_length))

    def begin(self, request: ReplayRequest, num_new_tokens: int, found: FoundPrefix) -> bool:
        """Allocate slots for `found` and for `num_new_tokens` more, and read from tiers what they have.

        Returns:
            False, with nothing changed, unless all tokens of the request fit if it runs alone.
        """
        if self.tiers is None or found.tier_hit is None:
            return self.allocate(request, num_new_tokens, found.prefix)
        start = self._clock_ns()
        has_room = self.tiers.begin(request, found.tier_hit, found.prefix, num_new_tokens)
        self._end_allocation(start)
        return has_room

    def allocate(
        self, request: ReplayRequest, num_new_tokens: int, prefix: CachedPrefix | None = None
    ) -> bool:
        """Allocate slots for `num_new_tokens` more; False, with nothing changed, if they do not fit.

        With a prefix the request is about to begin: all its tokens have to fit if it runs alone.
        """
        start = self._clock_ns()
        has_room = (
            self.manager.allocate_slots(
                request, num_new_tokens, prefix, full_sequence_must_fit=prefix is not None
            )
            is not None
        )
        self._end_allocation(start)
        return has_room

    def _end_allocation(self, start_ns: int) -> None:
        self.tally.allocate_ns.append(self._clock_ns() - start_ns)
        # A step of its own: what is allocated next is computed after it, and may begin with what it writes.
        self.manager.take_block_copies()
        self.tally.count_in_use(self.num_blocks_in_use)

    def is_reading(self, request: ReplayRequest) -> bool:
        """Return True while the request waits for what tiers read for it."""
        return self.tiers is not None and self.tiers.is_reading(request)

    def finish_reading(self, request: ReplayRequest) -> None:
        """Let the request hold the blocks that tiers have read, if it waits for some."""
        if self.tiers is not None and self.tiers.is_reading(request):
            self.tiers.finish(request)

    def copy(self, now_ms: float) -> float:
        """Return when the tiers' copies since the last call are done; `now_ms` if there are none."""
        return now_ms if self.tiers is None else self.tiers.copy(now_ms)

    def preempt(self, request: ReplayRequest, now_ms: float) -> int:
        """Take all blocks from a request that runs. Returns how many computed tokens are lost."""
        num_lost = 0
        if self.tiers is not None and self.tiers.is_reading(request):
            self.tiers.give_up(request)
        elif self.swap is None or not self.swap.take_out(request, now_ms):
            self._free(request)
            num_lost = request.num_computed_tokens
            request.num_computed_tokens = 0
        self.tally.count_preemption(request)
        return num_lost

    def end(self, request: ReplayRequest, end_ms: float, waited_ms: float | None = None) -> None:
        """Release the blocks of a request that ends at `end_ms`, or keep some of them.

        Args:
            waited_ms: what it waited for blocks, in all; None where requests do not wait.
        """
        if self._keeper is not None:
            self._keeper.keep(request)
        self.tally.count_end(request, self._free(request), end_ms, waited_ms)

    def _free(self, request: ReplayRequest) -> int:
        """Release a request's blocks after counting their runs. Returns how many these were."""
        num_blocks = 0
        for group_id in range(len(self.manager.groups)):
            block_ids = np.asarray(self.manager.get_block_ids(request.request_id, group_id))
            block_ids = block_ids[np.flatnonzero(block_ids)]  # 0 is the null block
            if len(block_ids):
                self.tally.count_table(len(block_ids), 1 + int(np.count_nonzero(np.diff(block_ids) != 1)))
            num_blocks += len(block_ids)
        start = self._clock_ns()
        self.manager.free(request)
        self.tally.free_ns.append(self._clock_ns() - start)
        return num_blocks

    def finish(self, mean_blocks_in_use: float) -> ReplayReport:
        """Complete the report."""
        if self.tiers is not None:
            self.tiers.fill_reports()
        return self.tally.finish(mean_blocks_in_use, self.manager.block_pool.num_evictions)
