"""`Tally`: counts and times of a running replay, and the rates computed from them at its end."""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from kv_pool.ids import RequestId
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.report import ReplayReport, summarize_calls, summarize_waits
from kv_pool.replay.request_outcomes import OutcomeCallback, RequestOutcome


class Tally:
    """The counts of one replay, and the outcomes of its requests. Its methods only update the report.

    Args:
        report: the report to fill in.
        on_outcome: called with the outcome of each request when it ends or is refused; none for counts only.
        clock: time in seconds, for the duration of the replay.

    Attributes:
        report: the counts so far; `finish` fills in rates and times.
        smallest_refused: number of blocks that the smallest refused request needs; 0 for none.
        look_up_ns, allocate_ns, free_ns: the duration of each call.
    """

    def __init__(
        self,
        report: ReplayReport,
        on_outcome: Sequence[OutcomeCallback] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.report = report
        self.smallest_refused = 0
        self.look_up_ns = array("q")
        self.allocate_ns = array("q")
        self.free_ns = array("q")
        self._on_outcome = on_outcome
        self._open: dict[RequestId, RequestOutcome] = {}  # of requests that have not ended
        self._num_turns: Counter[str] = Counter()
        self._waits_ms = array("d")
        self._sum_request_hit_rates = 0.0
        self._num_table_blocks = 0
        self._num_runs = 0
        self._clock = clock
        self._started = clock()

    def note_arrival(self, request: ReplayRequest, num_blocks_alone: int) -> bool:
        """Count a request that needs `num_blocks_alone`. Return False if the pool has fewer (refused)."""
        report = self.report
        report.requests += 1
        report.tokens_in += request.input_length
        report.blocks_looked_up += request.num_cacheable_blocks
        self._open_outcome(request)
        if num_blocks_alone <= report.num_blocks:
            return True
        report.refused_requests += 1
        outcome = self._open.pop(request.request_id)
        outcome.outcome = "refused"
        self._notify(outcome)
        if not self.smallest_refused or num_blocks_alone < self.smallest_refused:
            self.smallest_refused = num_blocks_alone
        return False

    def note_hit(self, request: ReplayRequest, num_found: int, num_found_on_device: int) -> None:
        """Count the hit of a request at its first admission.

        A hit in a partial block counts its tokens, but not the block.
        """
        report = self.report
        num_tokens = min(num_found, request.input_length)
        num_blocks = num_found // report.block_size
        report.blocks_hit += num_blocks
        report.tokens_hit += num_tokens
        self._sum_request_hit_rates += num_tokens / request.input_length
        outcome = self._open[request.request_id]
        outcome.blocks_hit, outcome.tokens_hit = num_blocks, num_tokens
        outcome.tokens_hit_in_tiers = max(0, num_tokens - num_found_on_device)

    def note_in_use(self, num_blocks: int) -> None:
        """Update the peak of blocks in use after an allocation."""
        self.report.peak_blocks_in_use = max(self.report.peak_blocks_in_use, num_blocks)

    def note_table(self, num_blocks: int, num_runs: int) -> None:
        """Count a released block table and its runs of consecutive ids."""
        self._num_table_blocks += num_blocks
        self._num_runs += num_runs

    def note_preemption(self, request: ReplayRequest) -> None:
        """Count the preemption of a running request."""
        self.report.preempted += 1
        self._open[request.request_id].preempted += 1

    def note_end(
        self, request: ReplayRequest, num_blocks: int, end_ms: float, waited_ms: float | None
    ) -> None:
        """Count the end of a request with `num_blocks` in its tables, and its waiting time if any."""
        if waited_ms is not None:
            self._waits_ms.append(waited_ms)
        outcome = self._open.pop(request.request_id)
        outcome.tokens_out = request.num_tokens - request.num_prompt_tokens
        outcome.blocks, outcome.waited_ms, outcome.end_ms = num_blocks, waited_ms or 0.0, end_ms
        self._notify(outcome)

    def _open_outcome(self, request: ReplayRequest) -> None:
        turn = None
        if request.session_id is not None:
            self._num_turns[request.session_id] += 1
            turn = self._num_turns[request.session_id]
        self._open[request.request_id] = RequestOutcome(
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

    def _notify(self, outcome: RequestOutcome) -> None:
        for callback in self._on_outcome:
            callback(outcome)

    @property
    def token_hit_rate(self) -> float:
        return self.report.tokens_hit / self.report.tokens_in if self.report.tokens_in else 0.0

    def finish(self, mean_blocks_in_use: float, num_evictions: int) -> ReplayReport:
        """Fill in the rates and times, and return the report."""
        report = self.report
        report.wall_seconds = self._clock() - self._started
        report.token_hit_rate = self.token_hit_rate
        if report.blocks_looked_up:
            report.block_hit_rate = report.blocks_hit / report.blocks_looked_up
        if report.requests:
            report.mean_request_token_hit_rate = self._sum_request_hit_rates / report.requests
        if self._num_runs:
            report.blocks_per_run = self._num_table_blocks / self._num_runs
        report.mean_blocks_in_use = mean_blocks_in_use
        report.evictions = num_evictions
        report.waiting = summarize_waits(self._waits_ms)
        report.look_up = summarize_calls(self.look_up_ns)
        report.allocate = summarize_calls(self.allocate_ns)
        report.free = summarize_calls(self.free_ns)
        return report
