"""`PoolAllocating`: the calls of a `GPUKVPool` that allocate, share and cache blocks."""

from collections.abc import Sequence
from time import perf_counter_ns

from kv_pool.adapter.allocation import as_request, check_priority
from kv_pool.adapter.freeing import PoolFreeing
from kv_pool.adapter.holder import Holder
from kv_pool.adapter.holdings import as_new_id, as_sequence_id
from kv_pool.adapter.prefixes import cache_prefix
from kv_pool.core.arguments import as_int, as_ints, as_list_of
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_checks import refuse_interrupted
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.taking import touch_listed
from kv_pool.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    KVPoolError,
    PoolExhaustedError,
    PoolInterruptedError,
    UnknownDeviceError,
)
from kv_pool.ids import BlockHash, BlockId, SequenceId, is_run
from kv_pool.metrics.latency import TIMED_EVERY
from kv_pool.protocol import NORMAL, AllocationResult, BlockAllocationRequest

_NONE: frozenset[SequenceId] = frozenset()


class PoolAllocating(PoolFreeing):
    """The part of `GPUKVPool` that allocates blocks and shares those of a sequence or a cached prefix."""

    # ---- allocating ------------------------------------------------------------------------------

    def allocate(self, request: BlockAllocationRequest) -> list[BlockId]:
        """Allocate blocks and append them to a sequence.

        The pool prefers the ids directly after the sequence's last block, then a free run, see `placement`,
        then a run that it clears by moving at most `max_moves` blocks, if the pool has `on_moved`. Then:

            1  compaction     a run is required and enough blocks are free: move other blocks out of the way
            2  eviction       too few free blocks, or no run: evict sequences, in `eviction_policy`'s order
            3  migration      call the migration hook, then retry once
            4  refusal        PoolExhaustedError

        Returns:
            `num_blocks` ids in the order of the sequence; no other sequence holds them.
        Raises:
            PoolExhaustedError: too few blocks, or no run where one is required; also a `MemoryError`. The
                message lists what was tried. Nothing has changed.
            EvictedSequenceError: the sequence was evicted, see `take_evictions`; also a `MemoryError`.
                Nothing has changed.
            PinLimitError, UnknownDeviceError, InvalidArgumentError, InvalidTypeError: nothing has changed.
            CopyFailedError: copying blocks out of the way failed. No block has moved; sequences that were
                already evicted stay evicted.
            Any exception of `on_evicted`: sequences that it was called for before are evicted.
            PoolInterruptedError: an earlier call was interrupted: call `repair`. All calls that change the
                pool raise it.
        Cost: O(num_blocks), under pressure O(blocks of the pool).
        """
        if self._number_allocation() % TIMED_EVERY:
            return [block.block_id for block in self._allocate(request)]
        started_ns = perf_counter_ns()
        try:
            return [block.block_id for block in self._allocate(request)]
        finally:
            self._allocation_latency.note(perf_counter_ns() - started_ns)

    def try_allocate(self, request: BlockAllocationRequest) -> AllocationResult:
        """Like `allocate`, but return a refusal as a result instead of raising it.

        Raises:
            InvalidArgumentError, InvalidTypeError, PoolInterruptedError, exceptions of `on_evicted`: as
            `allocate`. Any other `KVPoolError` is the result's `error`.
        Cost: as `allocate`; the first call, and those after a compaction, count the free runs of the pool.
        """
        started = self._clock()
        ids: list[BlockId] = []
        error = None
        try:
            ids = self.allocate(request)
        except (InvalidArgumentError, InvalidTypeError, PoolInterruptedError):
            raise
        except KVPoolError as refusal:
            error = refusal
        ended = self._clock()
        return AllocationResult(
            success=error is None,
            block_ids=ids,
            allocated_memory=len(ids) * self.block_bytes,
            allocation_time=(ended - started) * 1000,
            fragmentation_rate=self._track_fragmentation_rate(),
            is_contiguous=error is None and is_run(ids),
            error=error,
        )

    def allocate_many(self, requests: Sequence[BlockAllocationRequest]) -> list[list[BlockId]]:
        """Like `allocate` for each request in turn, all or none; never evict one's sequence for another.

        The migration hook is called with the first request that does not fit and the number of blocks that
        the whole batch lacks; then the pool retries the batch once.

        Raises:
            As `allocate`. The blocks of all requests are freed again, but evictions and moves made for
            earlier requests stay.
        """
        requests = [
            as_request(request) for request in as_list_of("requests", requests, BlockAllocationRequest)
        ]
        done: list[list[KVCacheBlock]] = []
        if self.migration_threshold and requests:
            self._migrate_early(requests[0], sum(request.num_blocks for request in requests))
        try:
            with self.lock:
                return self._allocate_all(requests, done)
        except PoolExhaustedError:
            num_blocks = sum(request.num_blocks for request in requests)
            if self._migration_hook is None or num_blocks > self.total_blocks:
                raise
            refused = requests[len(done)]
            num_missing = num_blocks - self.count_available(refused.priority)
        self._migration_hook(refused, max(0, num_missing))
        with self.lock:
            return self._allocate_all(requests, [], ["the migration hook"])

    def fork(
        self, parent_id: SequenceId, child_id: SequenceId, num_blocks: int | None = None
    ) -> list[BlockId]:
        """Create a sequence that shares the first `num_blocks` blocks of another one; None for all.

        Returns:
            The ids of the shared blocks. Before writing to a block with `ref_count` above 1, the caller has
            to allocate a block of its own.
        Raises:
            UnknownSequenceError: the parent holds no blocks.
            InvalidArgumentError: the child already holds blocks, or the parent holds fewer than `num_blocks`.
            EvictedSequenceError: parent or child was evicted, see `take_evictions`. In all cases nothing has
                changed.
        """
        with self.lock:
            parent = self.holdings.find_usable(as_sequence_id("parent_id", parent_id))
            child_id = as_new_id("child_id", child_id)
            if num_blocks is not None:
                num_blocks = as_int("num_blocks", num_blocks)
            self.block_pool.holds.check_whole()
            self.holdings.check_usable(child_id)
            if child_id in self._holders:
                raise InvalidArgumentError(
                    f"sequence {child_id} already holds blocks; fork() creates a new sequence"
                )
            count = len(parent.blocks) if num_blocks is None else num_blocks
            if not 0 <= count <= len(parent.blocks):
                raise InvalidArgumentError(
                    f"sequence {parent_id} has {len(parent.blocks)} blocks; {count} of them cannot be shared"
                )
            shared = list(parent.blocks)[:count]
            self._evictions.begin(child_id)
            self._share(Holder(child_id, parent.priority, self._clock()), shared)
            return [block.block_id for block in shared]

    # ---- the prefix cache ------------------------------------------------------------------------

    def cache_prefix(
        self,
        sequence_id: SequenceId,
        block_hashes: Sequence[BlockHash],
        token_ids: Sequence[int] | None = None,
    ) -> None:
        """Cache the first `len(block_hashes)` blocks of a sequence under these hashes, in its order.

        Blocks that are already cached keep their hashes.

        Args:
            token_ids: at least the tokens of these blocks, from the start of the sequence; for events. None:
                events carry no tokens, and subscribers that look up blocks by tokens cannot use them.
        Raises:
            UnknownSequenceError: the sequence holds no blocks.
            InvalidArgumentError: the sequence has fewer blocks than hashes, or `token_ids` is too short. In
                all cases nothing has changed.
        """
        with self.lock:
            blocks = list(self.holdings.find(sequence_id).blocks)
            block_hashes = as_list_of("block_hashes", block_hashes, bytes)
            if token_ids is not None:
                token_ids = as_ints("token_ids", token_ids)
            cache_prefix(self.block_pool, sequence_id, blocks, block_hashes, token_ids)

    def take_events(self) -> list[KVCacheEvent]:
        """Return the cache events since the last call, oldest first, and forget them.

        Always [] without `enable_kv_cache_events`. With it, events accumulate until this call.
        """
        with self.lock:
            return self.block_pool.take_events()

    def claim_prefix(
        self, sequence_id: SequenceId, block_hashes: Sequence[BlockHash], priority: int = NORMAL
    ) -> list[BlockId]:
        """Create a sequence that starts with the longest cached prefix of `block_hashes`.

        Returns:
            The ids of the prefix's blocks in order; [] on a miss, where no sequence is created.
        Raises:
            InvalidArgumentError: the sequence already holds blocks, or the priority is invalid.
            EvictedSequenceError: the sequence was evicted, see `take_evictions`. In all cases nothing has
                changed.
        """
        with self.lock:
            sequence_id = as_new_id("sequence_id", sequence_id)
            block_hashes = as_list_of("block_hashes", block_hashes, bytes)
            check_priority(priority)
            self.block_pool.holds.check_whole()
            self.holdings.check_usable(sequence_id)
            if sequence_id in self._holders:
                raise InvalidArgumentError(
                    f"sequence {sequence_id} already holds blocks; claim its prefix first"
                )
            self._evictions.begin(sequence_id)
            hits = self.block_pool.find_cached_prefix(block_hashes, len(block_hashes))
            self._num_looked_up_blocks += len(block_hashes)
            self._num_hit_blocks += len(hits)
            self._share(Holder(sequence_id, priority, self._clock()), hits)
            return [block.block_id for block in hits]

    # ---- internals, called with the lock held unless stated otherwise ----------------------------

    def _track_fragmentation_rate(self) -> float:
        with self.lock:
            return self.block_pool.track_fragmentation_rate(self.run_length)

    def _share(self, sequence: Holder, blocks: list[KVCacheBlock]) -> None:
        """Add one reference to each block and enter a new sequence that holds them; no-op without blocks."""
        if not blocks:
            return
        pool = self.block_pool
        pool.is_changing = True
        touch_listed(pool, blocks)
        if self.holdings.retention is not None:
            self.holdings.retention.note_taken(blocks)
        self._hold(sequence, blocks)
        pool.is_changing = False

    def _allocate(self, request: BlockAllocationRequest) -> list[KVCacheBlock]:
        if self._migration_hook is None:
            with self.lock:
                return self._allocate_locked(request)
        if self.migration_threshold:
            request = as_request(request)
            self._migrate_early(request, request.num_blocks)
        try:
            with self.lock:
                return self._allocate_locked(request)
        except PoolExhaustedError:
            num_missing = request.num_blocks - self.count_available(request.priority)
            if request.num_blocks > self.total_blocks:
                raise
        # Not locked: the hook may wait for another pool, whose hook may wait for this one.
        self._migration_hook(request, max(0, num_missing))
        with self.lock:
            return self._allocate_locked(request, ["the migration hook"])

    def _migrate_early(self, request: BlockAllocationRequest, num_blocks: int) -> None:
        """Call the migration hook if taking `num_blocks` would leave fewer free than the threshold.

        The pool is not locked.
        """
        num_missing = num_blocks + self.migration_threshold - self.get_free_blocks()
        if num_missing > 0 and num_blocks <= self.total_blocks and self._migration_hook is not None:
            self._migration_hook(request, num_missing)

    def _allocate_all(
        self,
        requests: Sequence[BlockAllocationRequest],
        done: list[list[KVCacheBlock]],
        tried: Sequence[str] = (),
    ) -> list[list[BlockId]]:
        """Allocate the blocks of all requests, or of none.

        Args:
            done: empty; receives the blocks of each served request, even if a later request fails.
        """
        self._victims.together = frozenset(request.sequence_id for request in requests)
        try:
            for request in requests:
                done.append(self._allocate_locked(request, tried))
        except Exception:
            for request, blocks in reversed(list(zip(requests, done, strict=False))):
                self.block_pool.holds.check_whole()
                if request.pinned:
                    self._pins.unpin(blocks)
                self._drop(blocks, {self._holders[request.sequence_id]: blocks})
            raise
        finally:
            self._victims.together = _NONE
        # Read the ids last: a later request may have moved the blocks of an earlier one.
        return [[block.block_id for block in blocks] for blocks in done]

    def _allocate_locked(
        self, request: BlockAllocationRequest, tried: Sequence[str] = ()
    ) -> list[KVCacheBlock]:
        request = as_request(request)
        sequence_id = request.sequence_id
        if self.holdings.frozen:
            self.holdings.check_usable(sequence_id)
        device_id = request.device_id
        if device_id is not None and device_id != self.device_id:
            raise UnknownDeviceError(
                f"this pool is on device {self.device_id}; ask the pool of device {device_id!r}, or migrate"
            )
        if request.pinned:
            self._pins.check_room(request.num_blocks)
        pool = self.block_pool
        if pool.is_changing:
            refuse_interrupted()
        sequence = self._holders.get(sequence_id)
        if sequence is None:
            after = None
            if self._evictions:
                self._evictions.begin(sequence_id)
        else:
            after = next(reversed(sequence.blocks))
        if self.holdings.retention is not None:
            self.holdings.retention.expire()
        taken = self._take(request, after, tried)
        if sequence is None:
            sequence = Holder(sequence_id, request.priority, self._clock())
        else:
            sequence.priority = max(sequence.priority, request.priority)
        self._hold(sequence, taken)
        if request.pinned:
            self._pins.pin(taken)
        pool.is_changing = False
        return taken
