"""`LiveReplay`: a trace's requests go through a pool in real time, so that there is something to look at."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.adapter.pressure import LRUEviction
from kv_pool.contiguous.defragmenter import Defragmenter
from kv_pool.control.serve_settings import ServeSettings
from kv_pool.core.block_hash import BlockHasher
from kv_pool.errors import InvalidArgumentError
from kv_pool.events.event_publisher import EventPublisher
from kv_pool.protocol import BlockAllocationRequest
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.trace import Trace
from kv_pool.replay.trace_clock import EngineRates

STEP_S = 0.05
"""Seconds from one step of the imagined engine to the next."""

_MAX_WAITING = 256
_MS_BETWEEN_ROUNDS = 1000.0


@dataclass
class _Running:
    """A request that holds blocks.

    Attributes:
        num_blocks: held.
        computed_s: when its prompt is computed and it begins to generate.
        num_generated: tokens since then.
    """

    request: ReplayRequest
    num_blocks: int
    computed_s: float
    num_generated: int = 0
    is_cached: bool = False


@dataclass(frozen=True)
class LiveProgress:
    """How a live replay is doing, since it began.

    Attributes:
        num_preempted: how often a running request lost its blocks to another.
        requests_per_s: finished ones.
    """

    seconds: float
    num_waiting: int
    num_running: int
    num_finished: int
    num_preempted: int
    requests_per_s: float


class LiveReplay:
    """An imagined engine that serves a trace's requests in real time, for ever: the trace begins anew.

        arrive -> waiting -> prefill -> decode, block by block -> free
                     ^___________________|  evicted by a request that grows

    There is no KV in the blocks; their ids, references, hashes and moves are a real pool's. A request is
    admitted when all its prompt's blocks are free, shared ones counted as well, and one more for each request
    that runs. When `_MAX_WAITING` requests wait, the next ones arrive later than the trace says.

    Args:
        publisher: gets the pool's events after each step. Their tokens are those that stand for a request:
            a hash id, once for each token that it covers; zeros for what was generated. None: no events.
        clock: seconds.
    Attributes:
        pool, defragmenter: what the engine runs on. The pool may be asked from any thread.
    Raises:
        TraceError: the trace cannot be read; from `run`, too, for a line further on.
        InvalidArgumentError: settings that cannot be meant; from `run`, if no request fits into the pool.
    """

    def __init__(
        self,
        settings: ServeSettings,
        *,
        rates: EngineRates | None = None,
        publisher: EventPublisher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = GPUKVPool(
            settings.blocks,
            settings.block_size,
            run_length=settings.run_length,
            eviction_policy=LRUEviction(),
            on_evicted=self._requeue,
            enable_kv_cache_events=publisher is not None,
        )
        self._publisher = publisher
        self.defragmenter = Defragmenter(
            self.pool,
            threshold=settings.defrag_threshold,
            interval_s=settings.defrag_interval,
            max_moves=settings.defrag_moves,
            max_evictions=settings.max_evictions,
            clock=clock,
        )
        self._rates = EngineRates(speedup=settings.speedup) if rates is None else rates
        self._clock = clock
        self._began_s = clock()
        trace = Trace(
            settings.trace, block_size=settings.trace_block_size, timestamp_unit=settings.timestamp_unit
        )
        self._requests = read_for_ever(trace, settings.block_size, settings.blocks)
        self._coming = next(self._requests)
        self._waiting: deque[ReplayRequest] = deque()
        self._running: dict[int, _Running] = {}
        self._prefill_free_s = self._began_s
        self._num_finished = 0
        self._num_preempted = 0

    def run(self, stop: Event) -> None:
        """Step by step until `stop` is set."""
        while not stop.wait(STEP_S):
            self.step()

    def step(self) -> None:
        """One step of the engine: who has come, who generates, who may begin; compaction; events."""
        now_s = self._clock()
        self._receive(now_s)
        for sequence_id in list(self._running):
            # It may have been evicted in this very step.
            if sequence_id in self._running:
                self._generate(sequence_id, now_s)
        self._admit(now_s)
        self.defragmenter.step()
        if self._publisher is not None:
            self._publisher.publish(self.pool.take_events())

    def get_progress(self) -> LiveProgress:
        seconds = self._clock() - self._began_s
        return LiveProgress(
            seconds=seconds,
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_finished=self._num_finished,
            num_preempted=self._num_preempted,
            requests_per_s=self._num_finished / seconds if seconds else 0.0,
        )

    def _receive(self, now_s: float) -> None:
        now_ms = (now_s - self._began_s) * 1000 * self._rates.speedup
        while self._coming.arrival_ms <= now_ms and len(self._waiting) < _MAX_WAITING:
            self._waiting.append(self._coming)
            self._coming = next(self._requests)

    def _admit(self, now_s: float) -> None:
        pool = self.pool
        while self._waiting and len(self._running) < self._rates.max_running:
            request = self._waiting[0]
            num_blocks = -(-request.num_tokens // pool.block_size)
            if num_blocks + len(self._running) > pool.get_free_blocks():
                return
            self._waiting.popleft()
            sequence_id = int(request.request_id)
            num_hashes = min(len(request.block_hashes), request.max_hit_tokens // pool.block_size)
            num_hits = len(pool.claim_prefix(sequence_id, request.block_hashes[:num_hashes]))
            pool.allocate(BlockAllocationRequest(num_blocks - num_hits, sequence_id))
            num_new_tokens = request.num_tokens - num_hits * pool.block_size
            started_s = max(now_s, self._prefill_free_s)
            self._prefill_free_s = started_s + num_new_tokens / self._rates.prefill_tokens_per_s
            self._running[sequence_id] = _Running(request, num_blocks, self._prefill_free_s)

    def _generate(self, sequence_id: int, now_s: float) -> None:
        running = self._running[sequence_id]
        request = running.request
        if now_s < running.computed_s:
            return
        num_due = int((now_s - running.computed_s) * self._rates.decode_tokens_per_s) - running.num_generated
        num_due = min(num_due, request.num_output_left)
        num_more = -(-(request.num_tokens + num_due) // self.pool.block_size) - running.num_blocks
        if num_more > 0:
            # Others may lose their blocks to this one; it fits if all of them do.
            self.pool.allocate(BlockAllocationRequest(num_more, sequence_id))
            running.num_blocks += num_more
        num_full = len(request.block_hashes)
        request.append_output(num_due)
        running.num_generated += num_due
        if not running.is_cached or len(request.block_hashes) > num_full:
            token_ids = None if self._publisher is None else request.all_token_ids
            self.pool.cache_prefix(sequence_id, request.block_hashes, token_ids)
            running.is_cached = True
        if not request.num_output_left:
            self.pool.free_sequence(sequence_id)
            del self._running[sequence_id]
            self._num_finished += 1

    def _requeue(self, sequence_id: int, block_ids: list[int]) -> None:
        """What it has generated is kept; it is computed anew, but for what is still cached then."""
        self._waiting.appendleft(self._running.pop(sequence_id).request)
        self._num_preempted += 1


def read_for_ever(trace: Trace, block_size: int, num_blocks: int) -> Iterator[ReplayRequest]:
    """The requests of a trace in the order they arrive, then again a second later, and so on; each with an id
    of its own. Those that would not fit into `num_blocks` alone are left out.

    Raises:
        TraceError: a line cannot be read.
        InvalidArgumentError: no request fits.
    """
    hasher = BlockHasher("xxh3_128", "0", block_size)
    number = 0
    begin_ms = now_ms = 0.0
    while True:
        smallest = 0
        num_fitting = 0
        for traced in trace:
            number += 1
            traced.line = number
            now_ms = traced.arrival_ms = max(now_ms, begin_ms + traced.arrival_ms)
            num_needed = -(-(traced.input_length + traced.output_length) // block_size)
            if num_needed > num_blocks:
                smallest = min(smallest or num_needed, num_needed)
                continue
            num_fitting += 1
            yield ReplayRequest(traced, block_size, "full_blocks_cap", trace.block_size, hasher)
        if not num_fitting:
            raise InvalidArgumentError(
                f"no request fits: the pool has {num_blocks} blocks of {block_size} tokens, the smallest "
                f"request needs {smallest}"
            )
        begin_ms = now_ms + _MS_BETWEEN_ROUNDS
