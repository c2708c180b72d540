"""`ReplayDriver`: times and counts a clock's calls to a manager, its tiers and its host pool."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, perf_counter_ns
from typing import Literal

import numpy as np

from kv_pool.ids import GroupId, RequestId
from kv_pool.lab.replay_request import ReplayRequest
from kv_pool.lab.replay_tiers import CopyLink, HostSwap, ReplayTiers
from kv_pool.lab.report import ReplayReport, find_share, summarize_calls, summarize_waits
from kv_pool.lab.request_outcomes import OutcomeCallback, RequestOutcome
from kv_pool.lab.settings import ReplaySettings
from kv_pool.manager.block_groups.block_group import CachedPrefix
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.retention.directive import MAX_PRIORITY, RetentionDirective
from kv_pool.tiers.onboarder import OnboardPlan, TierHit


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """The cached prefix of a prompt.

    Attributes:
        prefix: the part on the device.
        tier_hit: the part in lower tiers after it; None for none.
    """

    prefix: CachedPrefix
    tier_hit: TierHit | None = None

    @property
    def num_tokens(self) -> int:
        return self.prefix.num_tokens + (0 if self.tier_hit is None else self.tier_hit.num_tokens)


class ReplayTime:
    """The time of a replay, for cache policies and retention. It never goes backwards."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def read_s(self) -> float:
        """Return the time in seconds."""
        return self.now_ms / 1000


class ReplayDriver:
    """The manager of one replay, with its tiers, swapping, retention and counts.

        receive -> look_up -> begin -> finish_reading -> allocate, step by step -> end
                      ^                                    |  preempt
                      |____________________________________|

    Args:
        settings: the tiers, the host pool and the retention, among others.
        on_outcome: called with the outcome of each request when it ends or is refused.
        replay_time: set by `set_time`; None if nothing reads it.

    Attributes:
        report: the counts so far; `finish` computes its rates and times.
        tiers: the lower tiers of the manager's pool; None for none.
        swap: swaps preempted requests out if its rule says so; None to recompute all of them.
        smallest_refused: number of blocks that the smallest refused request needs; 0 for none.
        num_kept_sessions: number of ended requests whose session's blocks were retained.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        settings: ReplaySettings,
        on_outcome: Sequence[OutcomeCallback] = (),
        replay_time: ReplayTime | None = None,
    ) -> None:
        self.manager = manager
        self.settings = settings
        self.report = ReplayReport(
            manager.block_size, settings.num_blocks, settings.convention, settings.clock
        )
        self.smallest_refused = 0
        self.num_kept_sessions = 0
        self.tiers: ReplayTiers | None = None
        self.swap: HostSwap | None = None
        link = CopyLink(settings.rates.copy_bytes_per_s)
        if settings.has_tiers:
            self.tiers = ReplayTiers(manager, settings, link)
            self.report.tiers = self.tiers.reports
        if settings.host_blocks and settings.preemption != "recompute":
            self.swap = HostSwap(manager, settings, link, self.report)
        self._time = replay_time or ReplayTime()
        self._on_outcome = on_outcome
        self._open: dict[RequestId, RequestOutcome] = {}  # of requests that have not ended
        self._reading: dict[RequestId, OnboardPlan] = {}  # of requests that wait for blocks from tiers
        self._num_turns: Counter[str] = Counter()
        self._look_up_ns = array("q")
        self._allocate_ns = array("q")
        self._free_ns = array("q")
        self._waits_ms = array("d")
        self._sum_request_hit_rates = 0.0
        self._num_table_blocks = 0
        self._num_runs = 0
        self._started_s = perf_counter()

    @property
    def num_blocks_in_use(self) -> int:
        return self.report.num_blocks - self.manager.get_num_free_blocks()

    @property
    def token_hit_rate(self) -> float:
        return find_share(self.report.tokens_hit, self.report.tokens_in)

    def set_time(self, now_ms: float) -> None:
        """Set the time of the pool and of the retention. An earlier time than the last one is ignored."""
        self._time.now_ms = max(self._time.now_ms, now_ms)

    def receive(self, request: ReplayRequest, num_tokens: int) -> bool:
        """Count an arrival with a final length of `num_tokens`. Return False if it does not fit alone."""
        report = self.report
        report.requests += 1
        report.tokens_in += request.input_length
        report.blocks_looked_up += request.num_cacheable_blocks
        self._open[request.request_id] = self._open_outcome(request)
        num_blocks = self.manager.count_max_blocks(num_tokens)
        if num_blocks <= report.num_blocks:
            return True
        report.refused_requests += 1
        self._close_outcome(request, "refused")
        self.smallest_refused = min(num_blocks, self.smallest_refused or num_blocks)
        return False

    def _open_outcome(self, request: ReplayRequest) -> RequestOutcome:
        turn = None
        if request.session_id is not None:
            self._num_turns[request.session_id] += 1
            turn = self._num_turns[request.session_id]
        return RequestOutcome(
            line=request.number,
            outcome="done",
            session_id=request.session_id,
            arrival_ms=request.arrival_ms,
            end_ms=request.arrival_ms,
            input_length=request.input_length,
            output_length=request.num_output_left,
            blocks_looked_up=request.num_cacheable_blocks,
            tenant=request.tenant,
            turn=turn,
        )

    def look_up(self, request: ReplayRequest) -> FoundPrefix:
        """Find the cached prefix of the request's prompt, on the device and then in tiers.

        Sets `request.step_ends`.
        """
        start = perf_counter_ns()
        prefix = self.manager.get_computed_blocks(request, request.max_hit_tokens)
        request.step_ends = self.manager.list_step_ends(request, prefix)
        found = FoundPrefix(prefix)
        if self.tiers is not None:
            hit = self.tiers.onboarder.find_prefix(request, prefix, request.max_hit_tokens)
            if hit.num_tokens:
                found = FoundPrefix(prefix, hit)
        self._look_up_ns.append(perf_counter_ns() - start)
        return found

    def note_hit(self, request: ReplayRequest, found: FoundPrefix) -> None:
        """Count the cached prefix of a request at its first admission.

        A hit in a partial block counts its tokens, but not the block.
        """
        num_tokens = min(found.num_tokens, request.input_length)
        outcome = self._open[request.request_id]
        outcome.blocks_hit, outcome.tokens_hit = found.num_tokens // self.report.block_size, num_tokens
        outcome.tokens_hit_in_tiers = max(0, num_tokens - found.prefix.num_tokens)
        self.report.blocks_hit += outcome.blocks_hit
        self.report.tokens_hit += num_tokens
        self._sum_request_hit_rates += num_tokens / request.input_length
        if self.tiers is not None and found.tier_hit is not None:
            self.tiers.note_hit(found.tier_hit, max(0, found.num_tokens - request.input_length))

    def begin(self, request: ReplayRequest, num_new_tokens: int, found: FoundPrefix) -> bool:
        """Allocate slots for `found` and `num_new_tokens` more tokens, and start loading from tiers.

        Returns:
            False, with nothing changed, if not all tokens of the request fit.
        """
        if self.tiers is None or found.tier_hit is None:
            return self.allocate(request, num_new_tokens, found.prefix)
        start = perf_counter_ns()
        plan = self.tiers.onboarder.plan_onboard(
            request, found.tier_hit, found.prefix, num_new_tokens=num_new_tokens, full_sequence_must_fit=True
        )
        if plan is not None:
            self._reading[request.request_id] = plan
            is_loaded = plan.load()
            assert is_loaded, "a tier without bytes has no errors"
        self._end_allocation(start)
        return plan is not None

    def allocate(
        self, request: ReplayRequest, num_new_tokens: int, prefix: CachedPrefix | None = None
    ) -> bool:
        """Allocate slots for `num_new_tokens` more tokens.

        With a prefix, the request is starting, and all its tokens must fit.

        Returns:
            False, with nothing changed, if the tokens do not fit.
        """
        start = perf_counter_ns()
        added = self.manager.allocate_slots(
            request, num_new_tokens, prefix, full_sequence_must_fit=prefix is not None
        )
        self._end_allocation(start)
        return added is not None

    def _end_allocation(self, start_ns: int) -> None:
        self._allocate_ns.append(perf_counter_ns() - start_ns)
        # Each allocation is a step of its own: the next one may start with blocks that this one writes.
        self.manager.take_block_copies()
        self.report.peak_blocks_in_use = max(self.report.peak_blocks_in_use, self.num_blocks_in_use)

    def is_reading(self, request: ReplayRequest) -> bool:
        """Return True while the request waits for blocks from tiers."""
        return request.request_id in self._reading

    def finish_reading(self, request: ReplayRequest) -> None:
        """Commit the blocks loaded from tiers, if the request waits for any."""
        plan = self._reading.pop(request.request_id, None)
        if plan is not None:
            plan.commit()
            request.num_computed_tokens = plan.num_computed_tokens

    def copy(self, now_ms: float) -> float:
        """Return the completion time (ms) of the tiers' copies since the last call; `now_ms` for none."""
        return now_ms if self.tiers is None else self.tiers.copy(now_ms)

    def preempt(self, request: ReplayRequest, now_ms: float) -> int:
        """Preempt a running request: release or swap out all its blocks. Return the computed tokens lost."""
        num_lost = 0
        plan = self._reading.pop(request.request_id, None)
        if plan is not None:
            plan.abort()
        elif self.swap is None or not self.swap.take_out(request, now_ms):
            self._free(request)
            num_lost = request.num_computed_tokens
            request.num_computed_tokens = 0
        self.report.preempted += 1
        self._open[request.request_id].preempted += 1
        return num_lost

    def end(self, request: ReplayRequest, end_ms: float, waited_ms: float | None = None) -> None:
        """End a request at `end_ms`: set the retention of its blocks, then release them.

        Args:
            waited_ms: total time it waited for blocks; None if requests do not wait.
        """
        retention, settings = self.manager.retention, self.settings
        if retention is not None and settings.keep_prefix_tokens:
            head = RetentionDirective(0, settings.keep_prefix_tokens, priority=MAX_PRIORITY)
            retention.set_directives(request.request_id, [head])
        if retention is not None and settings.keep_session_s and request.session_id is not None:
            until = self._time.read_s() + settings.keep_session_s
            retention.keep_session(request.session_id, request, until)
            self.num_kept_sessions += 1
        if waited_ms is not None:
            self._waits_ms.append(waited_ms)
        outcome = self._open[request.request_id]
        outcome.blocks, outcome.waited_ms, outcome.end_ms = self._free(request), waited_ms or 0.0, end_ms
        outcome.tokens_out = request.num_tokens - request.num_prompt_tokens
        self._close_outcome(request, "done")

    def _close_outcome(self, request: ReplayRequest, result: Literal["done", "refused"]) -> None:
        outcome = self._open.pop(request.request_id)
        outcome.outcome = result
        for callback in self._on_outcome:
            callback(outcome)

    def _free(self, request: ReplayRequest) -> int:
        """Count the runs of a request's blocks, then release them. Return the number of blocks."""
        num_blocks = 0
        for group_id in range(len(self.manager.groups)):
            block_ids = np.asarray(self.manager.get_block_ids(request.request_id, GroupId(group_id)))
            block_ids = block_ids[np.flatnonzero(block_ids)]  # 0 is the null block
            if len(block_ids):
                self._num_table_blocks += len(block_ids)
                self._num_runs += 1 + int(np.count_nonzero(np.diff(block_ids) != 1))
            num_blocks += len(block_ids)
        start = perf_counter_ns()
        self.manager.free(request)
        self._free_ns.append(perf_counter_ns() - start)
        return num_blocks

    def finish(self, mean_blocks_in_use: float) -> ReplayReport:
        """Fill in the rates and times of the report, and return it."""
        report = self.report
        if self.tiers is not None:
            self.tiers.fill_reports()
        report.wall_seconds = perf_counter() - self._started_s
        report.token_hit_rate = self.token_hit_rate
        report.block_hit_rate = find_share(report.blocks_hit, report.blocks_looked_up)
        report.mean_request_token_hit_rate = find_share(self._sum_request_hit_rates, report.requests)
        report.blocks_per_run = find_share(self._num_table_blocks, self._num_runs)
        report.mean_blocks_in_use = mean_blocks_in_use
        report.evictions = self.manager.block_pool.num_evictions
        report.waiting = summarize_waits(self._waits_ms)
        report.look_up = summarize_calls(self._look_up_ns)
        report.allocate = summarize_calls(self._allocate_ns)
        report.free = summarize_calls(self._free_ns)
        return report
