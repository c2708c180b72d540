"""`Tally`: counts and times while a replay runs, and the report at its end."""

import time
from array import array

import numpy as np

from kv_pool.manager.cached_prefix import CachedPrefix
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.report import ReplayReport, summarize_calls


class Tally:
    """Drives the manager for a clock, timing each call, and counts what came of it.

    Attributes:
        report: counts so far; rates and times are filled in by `finish`.
        smallest_refused: blocks that the smallest refused request needs.
    """

    def __init__(self, manager: KVCacheManager, report: ReplayReport) -> None:
        self.manager = manager
        self.report = report
        self.smallest_refused = 0
        self._look_up_ns = array("q")
        self._allocate_ns = array("q")
        self._free_ns = array("q")
        self._sum_request_hit_rates = 0.0
        self._num_tables = 0
        self._num_table_blocks = 0
        self._num_runs = 0
        self._started = time.perf_counter()

    def count_request(self, request: ReplayRequest, num_blocks_alone: int) -> bool:
        """Count an arrival; False if it is refused since `num_blocks_alone` exceed the whole pool."""
        report = self.report
        report.requests += 1
        report.tokens_in += request.input_length
        report.blocks_looked_up += request.num_cacheable_blocks
        if num_blocks_alone <= report.num_blocks:
            return True
        report.refused_requests += 1
        if not self.smallest_refused or num_blocks_alone < self.smallest_refused:
            self.smallest_refused = num_blocks_alone
        return False

    def count_hit(self, request: ReplayRequest, prefix: CachedPrefix) -> None:
        """Count the prefix with which a request was admitted for the first time."""
        num_tokens = min(prefix.num_tokens, request.input_length)
        self.report.blocks_hit += len(prefix.blocks[0])
        self.report.tokens_hit += num_tokens
        self._sum_request_hit_rates += num_tokens / request.input_length

    def look_up(self, request: ReplayRequest) -> CachedPrefix:
        start = time.perf_counter_ns()
        prefix = self.manager.get_computed_blocks(request, request.max_hit_tokens)
        self._look_up_ns.append(time.perf_counter_ns() - start)
        return prefix

    def allocate(
        self, request: ReplayRequest, num_new_tokens: int, prefix: CachedPrefix | None = None
    ) -> bool:
        """Whether the request got slots for so many more tokens."""
        start = time.perf_counter_ns()
        has_room = self.manager.allocate_slots(request, num_new_tokens, prefix) is not None
        self._allocate_ns.append(time.perf_counter_ns() - start)
        in_use = self.num_blocks_in_use
        if in_use > self.report.peak_blocks_in_use:
            self.report.peak_blocks_in_use = in_use
        return has_room

    def free(self, request: ReplayRequest) -> None:
        """Give the request's blocks back, after looking how contiguous they were."""
        block_ids = np.asarray(self.manager.get_block_ids(request.request_id))
        if len(block_ids):
            self._num_table_blocks += len(block_ids)
            self._num_runs += 1 + int(np.count_nonzero(np.diff(block_ids) != 1))
        start = time.perf_counter_ns()
        self.manager.free(request)
        self._free_ns.append(time.perf_counter_ns() - start)

    @property
    def num_blocks_in_use(self) -> int:
        return self.report.num_blocks - self.manager.block_pool.get_num_free_blocks()

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
        report.look_up = summarize_calls(self._look_up_ns)
        report.allocate = summarize_calls(self._allocate_ns)
        report.free = summarize_calls(self._free_ns)
        return report
