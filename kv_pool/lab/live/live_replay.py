"""`LiveReplay`: run the requests of a trace through a pool in real time."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import isfinite
from threading import Event
from zlib import crc32

import msgspec
import numpy as np

from kv_pool.control.serve_settings import ServeSettings, make_defragmenter
from kv_pool.core.block_hash import BlockHasher
from kv_pool.errors import CorruptedPoolError, InvalidArgumentError
from kv_pool.events.event_publisher import EventPublisher
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.ids import BlockHash, BlockId, NodeName, RequestId, SequenceId
from kv_pool.lab.live.live_engine import LiveTiers, ManagerEngine, PoolEngine
from kv_pool.lab.replay_request import ReplayRequest
from kv_pool.lab.settings import EngineRates
from kv_pool.lab.trace import Trace, check_blocks
from kv_pool.storage.block_storage import BlockStorage

STEP_S = 0.05
"""Seconds from one step of the simulated engine to the next."""

_MAX_WAITING = 256
_MS_BETWEEN_ROUNDS = 1000.0


class _LiveRequest(ReplayRequest):
    """A request of a live replay.

    Attributes:
        computed_s: time at which its prompt is computed and it starts to generate; in the state that goes to
            another node, the seconds until then, negative afterwards.
        num_generated: tokens generated since then; its blocks are cached until the first one is.
        is_suspended: whether it is being migrated to another node.
    """

    computed_s: float = 0.0
    num_generated: int = 0
    is_suspended: bool = False

    @property
    def num_blocks(self) -> int:
        """The number of its blocks while it runs, and of those that it needs while it waits."""
        return -(-self.num_tokens // self.block_size)


@dataclass
class LiveProgress:
    """The progress of a live replay since its start.

    Attributes:
        num_preempted: how often a running request lost its blocks to another one.
        num_moved_out, num_moved_in: requests moved to other nodes, and requests received from them.
        requests_per_s: finished requests per second.
    """

    seconds: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    num_finished: int = 0
    num_preempted: int = 0
    num_moved_out: int = 0
    num_moved_in: int = 0
    requests_per_s: float = 0.0


class LiveReplay:
    """A simulated engine that serves the requests of a trace in real time and repeats the trace for ever.

        arrive -> waiting -> prefill -> decode, block by block -> free
                     ^___________________|  evicted by a request that grows

    No model computes KV; the ids, references, hashes and moves of the blocks are real. If the settings name a
    node or tiers, the blocks have bytes derived from their hashes. These are checked when a request arrives
    from another node, and when it ends. The replay is a `SequenceOwner`: a migrated request continues to
    generate on its new node. The name of the node keeps request ids distinct between nodes.

    A request is admitted if enough blocks are free for its whole prompt, shared blocks included, plus one for
    each running request. While `_MAX_WAITING` requests wait, new ones arrive later than the trace says.

    Args:
        publisher: gets the pool's events after each step. Their tokens are placeholders: each prompt token is
            the hash id that covers it, each generated token is 0. None: no events.
        clock: returns seconds.
    Attributes:
        pool, defragmenter: the parts that the engine uses. The pool may be queried from any thread.
        tiers: the lower tiers to which evicted blocks are offloaded; None without tiers.
    Raises:
        TraceError: the trace cannot be read; `run` raises it for a later line.
        InvalidArgumentError: the settings are invalid; `run` raises it if no request fits into the pool.
        CorruptedPoolError: raised by `run` if a block has wrong bytes.
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
        if settings.name is not None or settings.has_tiers:
            self._contents = BlockContents(settings.blocks + 1, settings.block_bytes)
        storage = None if self._contents is None else self._contents.storage
        has_events = publisher is not None
        self._running: dict[RequestId, _LiveRequest] = {}
        self._engine: PoolEngine | ManagerEngine
        if settings.manager:
            self._engine = ManagerEngine(
                settings, storage, self._requeue, self._running, enable_events=has_events
            )
        else:
            self._engine = PoolEngine(settings, storage, self._requeue, enable_events=has_events)
        self.pool = self._engine.pool
        self.tiers: LiveTiers | None = None
        if settings.has_tiers:
            self.tiers = LiveTiers(self.pool, storage, settings, enable_events=has_events)
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
        first_number = 1 if settings.name is None else find_first_number(NodeName(settings.name))
        self._requests = repeat_requests(trace, settings.block_size, settings.blocks, first_number)
        self._coming = next(self._requests)
        self._waiting: deque[_LiveRequest] = deque()
        self._prefill_free_s = self._began_s
        self._progress = LiveProgress()
        self._wrong: list[BlockId] = []

    def run(self, stop: Event) -> None:
        """Run steps until `stop` is set.

        Call it in another thread than the main one, where no signal handler can interrupt a step.
        """
        while not stop.wait(STEP_S):
            self.step()

    def step(self) -> None:
        """Run one step of the engine: arrivals, decoding, admission, compaction, events."""
        now_s = self._clock()
        # The lock spans the step, so that other threads see no allocated block without its bytes.
        with self.pool.lock:
            self._receive(now_s)
            for request_id in list(self._running):
                # An earlier request of this step may have evicted it.
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
        return replace(
            self._progress,
            seconds=seconds,
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            requests_per_s=self._progress.num_finished / seconds if seconds else 0.0,
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
            num_blocks = request.num_blocks
            num_hashes = min(len(request.block_hashes), request.max_hit_tokens // self._block_size)
            admitted = None
            if num_blocks + len(self._running) <= self.pool.get_free_blocks():
                admitted = engine.admit(request, num_blocks)
            if admitted is None:
                if self.tiers is not None:
                    self.tiers.prefetch(request.request_id, request.block_hashes[:num_hashes])
                return
            self._waiting.popleft()
            num_hits, new_ids = admitted
            num_hits += self._onboard(request, num_hits, num_hashes, new_ids)
            num_new_tokens = request.num_tokens - num_hits * self._block_size
            started_s = max(now_s, self._prefill_free_s)
            self._prefill_free_s = started_s + num_new_tokens / self._rates.prefill_tokens_per_s
            request.num_generated = 0
            request.computed_s = self._prefill_free_s
            self._running[request.request_id] = request

    def _generate(self, request_id: RequestId, now_s: float) -> None:
        request = self._running[request_id]
        if now_s < request.computed_s or request.is_suspended:
            return
        num_due = int((now_s - request.computed_s) * self._rates.decode_tokens_per_s) - request.num_generated
        num_due = min(num_due, request.num_output_left)
        num_more = -(-(request.num_tokens + num_due) // self._block_size) - request.num_blocks
        if num_more > 0:
            # May evict other requests. If all of them are evicted, this one fits.
            new_ids = self._engine.grow(request, num_due, num_more)
            if new_ids is None:
                return  # retry after the migration
            self._write(request, request.num_blocks, new_ids)
        num_full = len(request.block_hashes) if request.num_generated else -1
        request.append_output(num_due)
        request.num_computed_tokens = request.num_tokens
        request.num_generated += num_due
        if len(request.block_hashes) > num_full:
            self._engine.cache(request, self._publisher is not None)
        if not request.num_output_left:
            self._note_wrong(request_id)
            self._engine.finish(request)
            del self._running[request_id]
            self._progress.num_finished += 1

    # ---- migration: `SequenceOwner` -----------------------------------------------------------------

    def describe(self, sequence_id: SequenceId | RequestId) -> bytes:
        request = self._running[_as_request_id(sequence_id)]
        left_s = request.computed_s - self._clock()
        return msgspec.msgpack.encode(msgspec.structs.replace(request, computed_s=left_s))

    def list_token_ids(self, sequence_id: SequenceId | RequestId) -> list[int]:
        if self._publisher is None:
            return []
        return self._running[_as_request_id(sequence_id)].all_token_ids

    def suspend(self, sequence_id: SequenceId | RequestId) -> None:
        self._running[_as_request_id(sequence_id)].is_suspended = True

    def resume(self, sequence_id: SequenceId | RequestId) -> None:
        request = self._running[_as_request_id(sequence_id)]
        request.is_suspended = False
        if request.num_generated:  # it generated nothing meanwhile, and does not catch up
            request.computed_s = self._clock() - request.num_generated / self._rates.decode_tokens_per_s

    def on_departed(self, sequence_id: SequenceId | RequestId, target: NodeName) -> None:
        del self._running[_as_request_id(sequence_id)]
        self._progress.num_moved_out += 1

    def expect(self, sequence_id: SequenceId | RequestId, num_blocks: int, state: bytes) -> None:
        request = self._decode(state)
        num_needed = -(-(request.num_tokens + request.num_output_left) // self._block_size)
        is_ours = (
            str(request.number) == _as_request_id(sequence_id) and request.block_size == self._block_size
        )
        if not is_ours or num_blocks != request.num_blocks:
            raise InvalidArgumentError(
                f"sequence {sequence_id} with {num_blocks} blocks does not match request {request.number} "
                f"with {request.num_tokens} tokens in blocks of {request.block_size}"
            )
        if num_needed > self._num_blocks:
            raise InvalidArgumentError(
                f"sequence {sequence_id} will need {num_needed} blocks, the pool has {self._num_blocks}"
            )
        if any(waiting.request_id == _as_request_id(sequence_id) for waiting in self._waiting):
            raise InvalidArgumentError(f"sequence {sequence_id} is here already: it waits for blocks")

    def on_arrived(self, sequence_id: SequenceId | RequestId, state: bytes) -> None:
        request = self._decode(state)
        request.num_computed_tokens, request.is_suspended = request.num_tokens, False
        request.computed_s += self._clock()
        self._running[request.request_id] = request
        if request.num_generated:
            self.resume(sequence_id)
        self._progress.num_moved_in += 1
        self._note_wrong(request.request_id)

    def _decode(self, state: bytes) -> _LiveRequest:
        """Return the request that `describe` encoded. Raises InvalidArgumentError for other bytes."""
        try:
            num_fields = len(msgspec.msgpack.decode(state, type=list[msgspec.Raw]))
            request = msgspec.msgpack.decode(state, type=_LiveRequest)
            check_blocks(request.num_prompt_tokens, len(request.prompt_ids), request.tokens_per_id)
        except UNDECODABLE as error:
            raise InvalidArgumentError(
                f"this is not the state of a live replay's request: {error}"
            ) from error
        # Fields that are missing at the end would get their defaults.
        if num_fields != len(request.__struct_fields__):
            raise InvalidArgumentError(
                f"the state of request {request.number} has {num_fields} fields, not the "
                f"{len(request.__struct_fields__)} of this version; run the same version on both nodes"
            )
        num_generated = request.num_tokens - request.num_prompt_tokens
        if (
            not 0 <= request.num_generated <= num_generated
            or len(request.block_hashes) != request.num_tokens // request.block_size
            or not isfinite(request.computed_s)
        ):
            raise InvalidArgumentError(
                f"the state of request {request.number} contradicts itself: {request.num_tokens} tokens, "
                f"{request.num_prompt_tokens} of the prompt, {request.num_generated} generated since "
                f"{request.computed_s} s, and hashes of {len(request.block_hashes)} blocks of "
                f"{request.block_size} tokens"
            )
        return request

    # ---- bytes -----------------------------------------------------------------------------------

    def _write(self, request: ReplayRequest, start: int, block_ids: list[BlockId]) -> None:
        """Fill blocks of the request, from its `start`-th block on, with the bytes of their hashes."""
        if self._contents is not None:
            if self.tiers is not None:
                self.tiers.cache.flush_evicted()  # before the evicted contents are overwritten
            names = [request.name_block(start + at) for at in range(len(block_ids))]
            self._contents.write(block_ids, names)

    def _onboard(
        self, request: ReplayRequest, num_hits: int, num_hashes: int, block_ids: list[BlockId]
    ) -> int:
        """Fill the blocks after the hits: onboard them from tiers as far as possible, then write the others.

        Returns:
            The number of onboarded blocks.
        """
        num_read = 0
        if self.tiers is not None:
            num_read = self.tiers.onboard(num_hits, request.block_hashes[num_hits:num_hashes], block_ids)
        self._write(request, num_hits + num_read, block_ids[num_read:])
        return num_read

    def _note_wrong(self, request_id: RequestId) -> None:
        if self._contents is not None:
            request = self._running[request_id]
            block_ids = self._engine.list_ids(request)
            names = [request.name_block(at) for at in range(len(block_ids))]
            self._wrong += self._contents.find_wrong(block_ids, names)

    def _check_contents(self) -> None:
        if self._wrong:
            raise CorruptedPoolError(f"the bytes of blocks {self._wrong[:20]} do not match their hashes")

    def _requeue(self, request_id: RequestId) -> None:
        """Put an evicted request back at the head of the queue. It keeps its generated tokens."""
        request = self._running.pop(request_id)
        request.num_computed_tokens = 0
        self._waiting.appendleft(request)
        self._progress.num_preempted += 1


def _as_request_id(sequence_id: SequenceId | RequestId) -> RequestId:
    """Return the id of a request, which a `GPUKVPool` knows by its number."""
    return RequestId(str(sequence_id))


def find_first_number(name: NodeName) -> int:
    """Return the number of the first request on the node with this name.

    One of 9,999 starting numbers, a million apart, chosen by a hash of the name. Two names may collide.
    """
    return (crc32(name.encode()) % 9_999 + 1) * 1_000_000 + 1


def repeat_requests(
    trace: Trace, block_size: int, num_blocks: int, first_number: int = 1
) -> Iterator[_LiveRequest]:
    """Yield the requests of a trace in order of arrival, and repeat the trace a second after its end.

    Each request gets a new id, from `first_number` on. Requests larger than `num_blocks` are skipped.

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
            yield _LiveRequest.from_trace(traced, block_size, "full_blocks_cap", trace.block_size, hasher)
        if not num_fitting:
            raise InvalidArgumentError(
                f"no request fits: the pool has {num_blocks} blocks of {block_size} tokens, the smallest "
                f"request needs {smallest}"
            )
        begin_ms = now_ms + _MS_BETWEEN_ROUNDS


class BlockContents:
    """The memory of a pool's blocks. The bytes of a block are derived from its hash and checked against it.

    Args:
        num_blocks: number of blocks, the null block included.
        block_bytes: size of each block.

    Attributes:
        storage: the memory as the `BlockStorage` of the pool.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._rows = np.zeros((num_blocks, block_bytes), np.uint8)
        self.storage = BlockStorage.wrap_state([self._rows])

    def write(self, block_ids: Sequence[BlockId], names: Sequence[BlockHash]) -> None:
        """Fill each block with the bytes that belong to its name, a block hash."""
        for block_id, name in zip(block_ids, names, strict=True):
            self._rows[block_id] = self._make_bytes(name)

    def find_wrong(self, block_ids: Sequence[BlockId], names: Sequence[BlockHash]) -> list[BlockId]:
        """Return the ids of the blocks whose bytes do not match their names."""
        return [
            block_id
            for block_id, name in zip(block_ids, names, strict=True)
            if not np.array_equal(self._rows[block_id], self._make_bytes(name))
        ]

    def _make_bytes(self, name: BlockHash) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
        digest = np.frombuffer(blake2b(name).digest(), np.uint8)
        return np.resize(digest, self._rows.shape[1])
