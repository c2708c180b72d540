"""`LiveReplay`: a trace's requests go through a pool in real time, so that there is something to look at."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event
from zlib import crc32

import msgspec

from kv_pool.control.block_contents import BlockContents
from kv_pool.control.live_engine import LiveEngine, ManagerEngine, PoolEngine
from kv_pool.control.live_tiers import LiveTiers
from kv_pool.control.serve_settings import ServeSettings
from kv_pool.control.settings_pool import make_defragmenter
from kv_pool.core.block_hash import BlockHasher
from kv_pool.errors import CorruptedPoolError, InvalidArgumentError
from kv_pool.events.event_publisher import EventPublisher
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.replay.replay_request import ReplayRequest, RequestState
from kv_pool.replay.settings import EngineRates
from kv_pool.replay.trace import Trace

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
        is_suspended: it is on its way to another node.
    """

    request: ReplayRequest
    num_blocks: int
    computed_s: float
    num_generated: int = 0
    is_cached: bool = False
    is_suspended: bool = False


class _SequenceState(msgspec.Struct, frozen=True, array_like=True):
    """A running request on its way to another live replay.

    Attributes:
        prefill_left_s: until its prompt is computed; below 0 since then.
    """

    request: RequestState
    num_generated: int
    prefill_left_s: float
    is_cached: bool


@dataclass(frozen=True)
class LiveProgress:
    """How a live replay is doing, since it began.

    Attributes:
        num_preempted: how often a running request lost its blocks to another.
        num_given_up, num_taken_over: requests that went to other nodes, and that came from them.
        requests_per_s: finished ones.
    """

    seconds: float
    num_waiting: int
    num_running: int
    num_finished: int
    num_preempted: int
    num_given_up: int
    num_taken_over: int
    requests_per_s: float


class LiveReplay:
    """An imagined engine that serves a trace's requests in real time, for ever: the trace begins anew.

        arrive -> waiting -> prefill -> decode, block by block -> free
                     ^___________________|  evicted by a request that grows

    There is no KV in the blocks; their ids, references, hashes and moves are a real pool's. With a node's
    name in the settings they have bytes nevertheless, made of the blocks' hashes: these are checked when a
    request has come from another node, and again when it has ended. It is a `SequenceOwner`, so requests that
    migrate go on generating where they come to; a name makes their ids different from other nodes'.

    A request is admitted when all its prompt's blocks are free, shared ones counted as well, and one more for
    each request that runs. When `_MAX_WAITING` requests wait, the next ones arrive later than the trace says.

    Args:
        publisher: gets the pool's events after each step. Their tokens are those that stand for a request:
            a hash id, once for each token that it covers; zeros for what was generated. None: no events.
        clock: seconds.
    Attributes:
        pool, defragmenter: what the engine runs on. The pool may be asked from any thread.
        tiers: where blocks go that the pool takes anew; None for nowhere.
    Raises:
        TraceError: the trace cannot be read; from `run`, too, for a line further on.
        InvalidArgumentError: settings that cannot be meant; from `run`, if no request fits into the pool.
        CorruptedPoolError: from `run`: a block held other bytes than it should.
    """

    def __init__(
        self,
        settings: ServeSettings,
        *,
        rates: EngineRates | None = None,
        publisher: EventPublisher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._contents: BlockContents | None = None
        if settings.has_bytes:
            self._contents = BlockContents(settings.blocks + 1, settings.block_bytes)
        storage = None if self._contents is None else self._contents.storage
        has_events = publisher is not None
        make_engine = ManagerEngine if settings.manager else PoolEngine
        self._engine: LiveEngine = make_engine(settings, storage, self._requeue, enable_events=has_events)
        self.pool = self._engine.pool
        self.tiers: LiveTiers | None = None
        if settings.has_tiers:
            block_pool = self._engine.block_pool
            self.tiers = LiveTiers(block_pool, storage, self.pool.lock, settings, enable_events=has_events)
        self._num_blocks = settings.blocks
        self._block_size = settings.block_size
        self._publisher = publisher
        self.defragmenter = make_defragmenter(settings, self.pool, clock)
        self._rates = EngineRates(speedup=settings.speedup) if rates is None else rates
        self._clock = clock
        self._began_s = clock()
        trace = Trace(
            settings.trace, block_size=settings.trace_block_size, timestamp_unit=settings.timestamp_unit
        )
        first_number = 1 if settings.name is None else find_first_number(settings.name)
        self._requests = read_for_ever(trace, settings.block_size, settings.blocks, first_number)
        self._coming = next(self._requests)
        self._waiting: deque[ReplayRequest] = deque()
        self._running: dict[str, _Running] = {}
        self._prefill_free_s = self._began_s
        self._num_finished = 0
        self._num_preempted = 0
        self._num_given_up = 0
        self._num_taken_over = 0
        self._wrong: list[int] = []

    def run(self, stop: Event) -> None:
        """Step by step until `stop` is set."""
        while not stop.wait(STEP_S):
            self.step()

    def step(self) -> None:
        """One step of the engine: who has come, who generates, who may begin; compaction; events."""
        now_s = self._clock()
        # Nothing comes or goes in between: what a step takes has its bytes when the step ends.
        with self.pool.lock:
            self._receive(now_s)
            for request_id in list(self._running):
                # It may have been evicted in this very step.
                if request_id in self._running:
                    self._generate(request_id, now_s)
            self._admit(now_s)
            self.defragmenter.step()
            if self.tiers is not None:
                self.tiers.cache.flush()
            self._check_contents()
        if self._publisher is not None:
            self._publisher.publish(self._engine.take_events())

    def get_progress(self) -> LiveProgress:
        seconds = self._clock() - self._began_s
        return LiveProgress(
            seconds=seconds,
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_finished=self._num_finished,
            num_preempted=self._num_preempted,
            num_given_up=self._num_given_up,
            num_taken_over=self._num_taken_over,
            requests_per_s=self._num_finished / seconds if seconds else 0.0,
        )

    def _receive(self, now_s: float) -> None:
        now_ms = (now_s - self._began_s) * 1000 * self._rates.speedup
        while self._coming.arrival_ms <= now_ms and len(self._waiting) < _MAX_WAITING:
            self._waiting.append(self._coming)
            self._coming = next(self._requests)

    def _admit(self, now_s: float) -> None:
        engine = self._engine
        while self._waiting and len(self._running) < self._rates.max_running:
            request = self._waiting[0]
            num_blocks = -(-request.num_tokens // self._block_size)
            num_hashes = min(len(request.block_hashes), request.max_hit_tokens // self._block_size)
            admitted = None
            if num_blocks + len(self._running) <= engine.get_free_blocks():
                admitted = engine.admit(request, num_blocks)
            if admitted is None:
                if self.tiers is not None:
                    self.tiers.prefetch(request.request_id, request.block_hashes[:num_hashes])
                return
            self._waiting.popleft()
            num_hits, new_ids = admitted
            num_hits += self._read_back(request, num_hits, num_hashes, new_ids)
            num_new_tokens = request.num_tokens - num_hits * self._block_size
            started_s = max(now_s, self._prefill_free_s)
            self._prefill_free_s = started_s + num_new_tokens / self._rates.prefill_tokens_per_s
            self._running[request.request_id] = _Running(request, num_blocks, self._prefill_free_s)

    def _generate(self, request_id: str, now_s: float) -> None:
        running = self._running[request_id]
        request = running.request
        if now_s < running.computed_s or running.is_suspended:
            return
        num_due = int((now_s - running.computed_s) * self._rates.decode_tokens_per_s) - running.num_generated
        num_due = min(num_due, request.num_output_left)
        num_more = -(-(request.num_tokens + num_due) // self._block_size) - running.num_blocks
        if num_more > 0:
            # Others may lose their blocks to this one; it fits if all of them do.
            new_ids = self._engine.grow(request, num_due, num_more)
            if new_ids is None:
                return  # try again when the migration is over
            self._write(request, running.num_blocks, new_ids)
            running.num_blocks += num_more
        num_full = len(request.block_hashes)
        request.append_output(num_due)
        request.num_computed_tokens = request.num_tokens
        running.num_generated += num_due
        if not running.is_cached or len(request.block_hashes) > num_full:
            self._engine.cache(request, self._publisher is not None)
            running.is_cached = True
        if not request.num_output_left:
            self._note_wrong(request_id)
            self._engine.finish(request)
            del self._running[request_id]
            self._num_finished += 1

    # ---- going to other nodes, and coming from them: `SequenceOwner` --------------------------------

    def describe(self, sequence_id: int | str) -> bytes:
        running = self._running[str(sequence_id)]
        left_s = running.computed_s - self._clock()
        return msgspec.msgpack.encode(
            _SequenceState(running.request.get_state(), running.num_generated, left_s, running.is_cached)
        )

    def list_token_ids(self, sequence_id: int | str) -> list[int]:
        return [] if self._publisher is None else self._running[str(sequence_id)].request.all_token_ids

    def suspend(self, sequence_id: int | str) -> None:
        self._running[str(sequence_id)].is_suspended = True

    def resume(self, sequence_id: int | str) -> None:
        running = self._running[str(sequence_id)]
        running.is_suspended = False
        if running.num_generated:  # it has not generated meanwhile, and does not catch up
            running.computed_s = self._clock() - running.num_generated / self._rates.decode_tokens_per_s

    def give_up(self, sequence_id: int | str, target: str) -> None:
        del self._running[str(sequence_id)]
        self._engine.give_up(str(sequence_id))
        self._num_given_up += 1

    def expect(self, sequence_id: int | str, num_blocks: int, state: bytes) -> None:
        arriving = self._decode(state)
        request = arriving.request
        num_needed = -(-(request.num_tokens + request.num_output_left) // self._block_size)
        is_ours = str(request.number) == str(sequence_id) and request.block_size == self._block_size
        if not is_ours or num_blocks < -(-request.num_tokens // self._block_size):
            raise InvalidArgumentError(
                f"sequence {sequence_id} with {num_blocks} blocks is said to be request {request.number} "
                f"with {request.num_tokens} tokens in blocks of {request.block_size}"
            )
        if num_needed > self._num_blocks:
            raise InvalidArgumentError(
                f"sequence {sequence_id} will need {num_needed} blocks, the pool has {self._num_blocks}"
            )
        if any(waiting.request_id == str(sequence_id) for waiting in self._waiting):
            raise InvalidArgumentError(f"sequence {sequence_id} is here already: it waits for blocks")

    def take_over(self, sequence_id: int | str, state: bytes) -> None:
        arriving = self._decode(state)
        now_s = self._clock()
        computed_s = now_s + arriving.prefill_left_s
        if arriving.num_generated:
            computed_s = now_s - arriving.num_generated / self._rates.decode_tokens_per_s
        request = ReplayRequest.from_state(arriving.request)
        self._engine.take_over(request)
        num_blocks = len(self._engine.list_ids(request))
        self._running[str(sequence_id)] = _Running(
            request, num_blocks, computed_s, arriving.num_generated, arriving.is_cached
        )
        self._num_taken_over += 1
        self._note_wrong(request.request_id)

    def _decode(self, state: bytes) -> _SequenceState:
        try:
            return msgspec.msgpack.decode(state, type=_SequenceState)
        except UNDECODABLE as error:
            raise InvalidArgumentError(f"this is no request of a live replay: {error}") from error

    # ---- bytes -----------------------------------------------------------------------------------

    def _write(self, request: ReplayRequest, start: int, block_ids: list[int]) -> None:
        """Give the request's blocks from a place on the bytes that they will be checked for."""
        if self._contents is not None:
            if self.tiers is not None:
                self.tiers.cache.store_pending()  # these blocks hold what they held before until now
            names = [request.name_block(start + at) for at in range(len(block_ids))]
            self._contents.write(block_ids, names)

    def _read_back(self, request: ReplayRequest, num_hits: int, num_hashes: int, block_ids: list[int]) -> int:
        """Fill blocks that come after hits: from tiers as far as these have them, and what is left anew.

        Returns:
            How many were in tiers.
        """
        num_read = 0
        if self.tiers is not None:
            self.tiers.note_hits(num_hits)
            keys = self.tiers.find(request.block_hashes[num_hits:num_hashes])
            if keys:
                num_read = self.tiers.read_back(keys, block_ids[: len(keys)])
        self._write(request, num_hits + num_read, block_ids[num_read:])
        return num_read

    def _note_wrong(self, request_id: str) -> None:
        if self._contents is not None:
            request = self._running[request_id].request
            block_ids = self._engine.list_ids(request)
            names = [request.name_block(at) for at in range(len(block_ids))]
            self._wrong += self._contents.find_wrong(block_ids, names)

    def _check_contents(self) -> None:
        if self._wrong:
            raise CorruptedPoolError(f"the blocks {self._wrong[:20]} do not hold what they should")

    def _requeue(self, request_id: str) -> None:
        """What it has generated is kept; it is computed anew, but for what is still cached then."""
        self._waiting.appendleft(self._running.pop(request_id).request)
        self._num_preempted += 1


def find_first_number(name: str) -> int:
    """The first request's number on a node of this name: another one's numbers are others, as a rule.

    A million requests have room between this and the next; of ten thousand names two may have the same.
    """
    return (crc32(name.encode()) % 9_999 + 1) * 1_000_000 + 1


def read_for_ever(
    trace: Trace, block_size: int, num_blocks: int, first_number: int = 1
) -> Iterator[ReplayRequest]:
    """The requests of a trace in the order they arrive, then again a second later, and so on; each with an id
    of its own, from `first_number` on. Those that would not fit into `num_blocks` alone are left out.

    Raises:
        TraceError: a line cannot be read.
        InvalidArgumentError: no request fits.
    """
    hasher = BlockHasher("xxh3_128", "0", block_size)
    number = first_number - 1
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
