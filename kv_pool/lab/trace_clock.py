"""`TraceClock`: a scheduler in virtual time; requests arrive by timestamp, overlap and are preempted."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from kv_pool.ids import RequestId
from kv_pool.lab.driver import ReplayDriver
from kv_pool.lab.groups import PromptSteps
from kv_pool.lab.replay_request import ReplayRequest
from kv_pool.lab.report import ReplayReport


class TraceClock:
    """A scheduler in virtual time over the real manager.

        arrive -> waiting -> load from tiers -> prefill, in steps -> decode -> free
                     ^_______________|_______________|_________________|  preempted

    It serves requests in order of arrival. If a running request needs a block and none is free, the last
    admitted request is preempted. A request that does not fit alone with all its output is refused on
    arrival, so every other request finishes.

    Args:
        driver: the manager and its companions, and the speed of the simulated engine.
        steps: the division of prompts into steps. Steps of different prompts interleave.
    """

    def __init__(self, driver: ReplayDriver, steps: PromptSteps) -> None:
        self.driver = driver
        self.report = driver.report
        self.rates = driver.settings.rates
        self._steps = steps
        self._now_ms = 0.0
        self._prefill_free_ms = 0.0
        self._waiting: deque[ReplayRequest] = deque()
        self._running: dict[RequestId, ReplayRequest] = {}  # in order of admission
        self._admissions: dict[RequestId, int] = {}
        self._due: list[tuple[float, int, RequestId, int, int]] = []
        self._sequence = 0
        self._ms_by_blocks: dict[int, float] = {}  # the time with each number of blocks in use
        self._running_ms = 0.0
        self._waited_ms: dict[RequestId, float] = {}  # minus the time of joining the queue, while it waits
        self._num_lost_tokens: dict[RequestId, int] = {}
        self._first_ms: float | None = None
        self._preempted_ms = -1.0

    @property
    def num_unfinished(self) -> int:
        """Number of requests that wait or run."""
        return len(self._waiting) + len(self._running)

    def run(
        self,
        requests: Iterable[ReplayRequest],
        on_request: Callable[[], None],
        on_step: Callable[[], None] | None = None,
    ) -> ReplayReport:
        """Replay all requests to their end and return the report.

        Args:
            on_request: called after each arrival.
            on_step: called after each step once all requests have arrived; None for no calls.
        """
        arrivals = self._arrive(requests)
        coming = next(arrivals, None)
        while coming is not None or self._due:
            if coming is not None and (not self._due or coming.arrival_ms <= self._due[0][0]):
                self._advance(coming.arrival_ms)
                self._receive(coming)
                on_request()
                coming = next(arrivals, None)
            else:
                due_ms, _, request_id, admission, num_tokens = heapq.heappop(self._due)
                if self._admissions.get(request_id) != admission:
                    continue  # preempted since this was planned
                self._advance(due_ms)
                self._step(self._running[request_id], num_tokens)
                if coming is None and on_step is not None:
                    on_step()
            self._admit()
        simulated_ms = self._now_ms - (self._first_ms or 0.0)
        self.report.simulated_ms = simulated_ms
        self.report.mean_running = self._running_ms / simulated_ms if simulated_ms else 0.0
        self.report.p99_blocks_in_use = self._find_p99_blocks()
        block_ms = sum(num_blocks * ms for num_blocks, ms in self._ms_by_blocks.items())
        return self.driver.finish(block_ms / simulated_ms if simulated_ms else 0.0)

    def _find_p99_blocks(self) -> int:
        """Return the least number of blocks that is not exceeded during 99 % of the time."""
        num_blocks, above_ms = 0, 0.0
        limit_ms = sum(self._ms_by_blocks.values()) / 100
        for num_blocks in sorted(self._ms_by_blocks, reverse=True):
            above_ms += self._ms_by_blocks[num_blocks]
            if above_ms > limit_ms:
                break
        return num_blocks

    def _arrive(self, requests: Iterable[ReplayRequest]) -> Iterator[ReplayRequest]:
        last_ms = 0.0
        for request in requests:
            if request.arrival_ms < last_ms:
                self.report.late_requests += 1
                request.arrival_ms = last_ms
            last_ms = request.arrival_ms
            request.arrival_ms /= self.rates.speedup
            yield request

    def _advance(self, to_ms: float) -> None:
        if self._first_ms is None:
            self._first_ms = to_ms
        elif to_ms > self._now_ms:
            num_blocks = self.driver.num_blocks_in_use
            self._ms_by_blocks[num_blocks] = self._ms_by_blocks.get(num_blocks, 0.0) + to_ms - self._now_ms
        self._running_ms += len(self._running) * (to_ms - self._now_ms)
        self._now_ms = to_ms
        self.driver.set_time(to_ms)

    def _receive(self, request: ReplayRequest) -> None:
        if self.driver.receive(request, request.num_tokens + request.num_output_left):
            self._waiting.append(request)
            self._waited_ms[request.request_id] = -self._now_ms

    def _admit(self) -> None:
        # A preempted request waits until time has advanced. Otherwise a request whose prompt is cached would
        # be admitted at once and preempt itself again, without end.
        if self._running and self._now_ms <= self._preempted_ms:
            return
        swap = self.driver.swap
        while self._waiting and len(self._running) < self.rates.max_running:
            request = self._waiting[0]
            if swap is not None and swap.holds(request):
                copied_ms = swap.bring_back(request, self._count_next(request), self._now_ms)
                if copied_ms is None:
                    return
                self._run(request)
                self._plan(request, copied_ms, 0)
            else:
                found = self.driver.look_up(request)
                num_tokens = self._steps.count_next(found.num_tokens, request.num_tokens, request.step_ends)
                if not self.driver.begin(request, num_tokens, found):
                    return
                if request.request_id not in self._admissions:
                    self.driver.note_hit(request, found)
                num_lost = self._num_lost_tokens.pop(request.request_id, 0)
                self.report.tokens_recomputed += max(0, num_lost - found.num_tokens)
                self._run(request)
                if self.driver.is_reading(request):
                    self._plan(request, self.driver.copy(self._now_ms), 0)
                else:
                    request.num_computed_tokens = found.num_tokens
                    self._prefill(request, num_tokens)

    def _run(self, request: ReplayRequest) -> None:
        """Move the request from the front of the queue to the running requests."""
        self._waiting.popleft()
        self._waited_ms[request.request_id] += self._now_ms
        self._running[request.request_id] = request
        self._sequence += 1
        self._admissions[request.request_id] = self._sequence
        self.report.peak_running = max(self.report.peak_running, len(self._running))

    def _prefill(self, request: ReplayRequest, num_tokens: int) -> None:
        """Schedule the computation of `num_tokens` prompt tokens after the prompts queued before."""
        start_ms = max(self.driver.copy(self._now_ms), self._prefill_free_ms)
        self._prefill_free_ms = start_ms + 1000 * num_tokens / self.rates.prefill_tokens_per_s
        self._plan(request, self._prefill_free_ms, num_tokens)

    def _plan(self, request: ReplayRequest, due_ms: float, num_tokens: int) -> None:
        """Schedule the end of the request's step of `num_tokens` tokens at `due_ms`."""
        self._sequence += 1
        admission = self._admissions[request.request_id]
        heapq.heappush(self._due, (due_ms, self._sequence, request.request_id, admission, num_tokens))

    def _step(self, request: ReplayRequest, num_tokens: int) -> None:
        """Complete a step of `num_tokens` tokens, or a load; then end the request or plan its next step."""
        self.driver.finish_reading(request)
        if request.num_computed_tokens < request.num_tokens:
            request.num_computed_tokens += num_tokens
        elif num_tokens:
            request.append_output(num_tokens)
            self.report.tokens_out += num_tokens
            self.driver.manager.cache_blocks(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens
        num_next = self._count_next(request)
        if not num_next:
            self._end(request)
            return
        while not self.driver.allocate(request, num_next):
            victim = self._running[next(reversed(self._running))]
            self._preempt(victim)
            if victim is request:
                return
        if request.num_computed_tokens < request.num_tokens:
            self._prefill(request, num_next)
        else:
            self._plan(
                request,
                self.driver.copy(self._now_ms) + 1000 * num_next / self.rates.decode_tokens_per_s,
                num_next,
            )

    def _count_next(self, request: ReplayRequest) -> int:
        """Return the tokens of the next step: prompt, or output until a block is full; 0 at the end."""
        if request.num_computed_tokens < request.num_tokens:
            return self._steps.count_next(request.num_computed_tokens, request.num_tokens, request.step_ends)
        block_size = self.driver.manager.block_size
        return min(request.num_output_left, block_size - request.num_tokens % block_size)

    def _end(self, request: ReplayRequest) -> None:
        self.driver.end(request, self._now_ms, self._waited_ms.pop(request.request_id))
        del self._running[request.request_id]
        del self._admissions[request.request_id]

    def _preempt(self, request: ReplayRequest) -> None:
        self._num_lost_tokens[request.request_id] = self.driver.preempt(request, self._now_ms)
        self._preempted_ms = self._now_ms
        del self._running[request.request_id]
        self._admissions[request.request_id] = 0
        self._waiting.appendleft(request)
        self._waited_ms[request.request_id] -= self._now_ms
