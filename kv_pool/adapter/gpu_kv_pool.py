"""`GPUKVPool`: `KVPoolProtocol` over a block pool that indexes its free runs. Thread-safe."""

import time
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping, Sequence, ValuesView
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar, cast

from kv_pool.adapter.allocation import Allocation, as_priority, as_request
from kv_pool.adapter.pool_lock import PoolLock
from kv_pool.contiguous import compaction
from kv_pool.contiguous.compaction import Relocation
from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH, RunBlockPool
from kv_pool.core.arguments import (
    as_count,
    as_int,
    as_ints,
    as_list,
    as_list_of,
    check_type,
    refuse_copy,
)
from kv_pool.core.block import KVCacheBlock, list_ids
from kv_pool.core.extra_keys import KnownTokens
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.taking import touch_listed
from kv_pool.errors import (
    EvictedSequenceError,
    InvalidArgumentError,
    InvalidBlockError,
    InvalidTypeError,
    KVPoolError,
    PoolExhaustedError,
    PoolInterruptedError,
)
from kv_pool.ids import BlockHash, BlockId, BlockMove, GroupId, NodeName, SequenceId, is_run
from kv_pool.manager.sequences.holdings import Holder, Holdings, as_new_id, as_sequence_id, import_retention
from kv_pool.manager.sequences.ranked_order import EvictionPolicy, LRUEviction
from kv_pool.protocol import (
    NO_SEQUENCE,
    NORMAL,
    URGENT,
    AllocationResult,
    BlockAllocationRequest,
    BlockInfo,
    Eviction,
    KVPoolProtocol,
    MigrationResult,
)
from kv_pool.reports.controlled_pool import ControlledPool
from kv_pool.reports.latency import TIMED_EVERY, LatencyWindow
from kv_pool.reports.sequences import SequenceReport

if TYPE_CHECKING:
    from os import PathLike

    from kv_pool.adapter.migration_routes import MigrationRoutes
    from kv_pool.core.cache_policy import CachePolicy
    from kv_pool.events.stream_state import StreamState
    from kv_pool.manager.retention.block_retention import BlockRetention
    from kv_pool.migration.migrator import Migrator
    from kv_pool.storage.block_layout import BlockLayout
    from kv_pool.storage.block_storage import BlockStorage
    from kv_pool.tiers.dump_file import PoolDumpHeader
    from kv_pool.tiers.pool_dump import LoadedPool

Ids = TypeVar("Ids")

_TIMED_LOOKUPS = 127
"""A look-up is timed if the number of blocks looked up before is a multiple of this: about one in as many."""


class GPUKVPool(ControlledPool[RunBlockPool], KVPoolProtocol):
    """A pool of the blocks of one device; callers allocate blocks by id, for sequences.

        >>> from kv_pool import BlockAllocationRequest, GPUKVPool
        >>> pool = GPUKVPool(total_blocks=100, block_size=16)
        >>> pool.allocate(BlockAllocationRequest(num_blocks=3, sequence_id=1))
        [4, 5, 6]
        >>> pool.allocate(BlockAllocationRequest(num_blocks=1, sequence_id=1)), pool.blocks_of(1)
        ([7], [4, 5, 6, 7])
        >>> pool.fork(1, 2)
        [4, 5, 6, 7]
        >>> pool.free_sequence(1), pool.get_free_blocks(), pool.get_block_info(4).sequence_id
        (0, 96, 2)

    Block ids run from 1 to `total_blocks`. Block 0 is the null block, so a storage needs `total_blocks` + 1.

    A full pool evicts sequences that have no pinned block, the least recently used first, see `allocate`.
    With `eviction_policy=None` it refuses the request. Using an evicted sequence raises EvictedSequenceError.

    Args:
        block_size: tokens per block.
        device_id: id of this pool's device; distinct among connected pools.
        storage: the bytes of the blocks. Without a storage the pool cannot migrate blocks, and if the blocks
            have bytes at all, `on_moved` has to copy them, all moves at once like `BlockStorage.apply_moves`.
        block_bytes: bytes per block for `AllocationResult`; ignored if there is a storage.
        reserved_blocks: free blocks that requests of priority 0 cannot take.
        max_pinned_blocks: how many blocks may be pinned at once; None for all, also after `grow`.
        eviction_policy: which sequences to evict for a request that finds too few free blocks: by default the
            least recently used one of the lowest priority first. None: evict no sequence.
        on_evicted: called with a sequence's id and its block ids before the sequence loses them. The pool is
            locked: do not wait for another thread in it. It may free sequences and allocate blocks; a
            sequence that it pins stays. Without this callback, see `take_evictions`.
        on_moved: called with a `Relocation` when ids have changed, before any old id can be taken. The pool
            is locked, and it may not allocate or free. Without it only `defragment` and `shrink` change ids.
        migration_hook: called with the request that is about to be refused and the number of blocks that are
            missing (in `allocate_many`, for the whole batch). The pool is not locked. The hook may free or
            migrate blocks; then the pool retries the request, or the batch, once. See `MigrationHook`.
        migration_threshold: in blocks. Call the migration hook also before a request would leave fewer blocks
            free than this, and so before evicting a sequence for it.
        run_length: in blocks; the run length that `get_fragmentation_rate` measures.
        placement: how to choose runs: "buddy", "first_fit" or "oldest", see `RunBlockPool`.
        enable_caching: freed blocks keep their hashes until they are reused.
        enable_kv_cache_events: record which blocks are cached and evicted, for `take_events`.
        policy: the cache policy that chooses the cached blocks to evict, see `BlockPool.open_policy`. None:
            the least recently freed ones. With a policy, runs are only looked for where they are required.
        live_curve: estimate hit rates at other capacities, for `get_statistics`.
        clock: returns seconds, for `last_access_time` and the times in results.

    Attributes:
        block_pool: the underlying pool, for its prefix cache, holds and invariants. Blocks taken from it
            directly belong to no sequence; they move like other blocks unless they are held
            (`block_pool.hold`). Calls on it are not locked.
        lock: reentrant; held during each call. Hold it to make several calls atomic.
        storage: as given.
        holdings: for other parts of the adapter; use it only with the lock held.

    Processes: a child of `fork()` has a copy of the pool, which does not follow the original's later calls.
    If another thread was in a call at the fork, the copy is incomplete, and its calls raise ForkedPoolError.

    Priorities: requests of priority 1 and 2 may use the reserve. A request never evicts a sequence of higher
    priority. The cache keeps blocks that a sequence of higher priority freed for longer.

    While a migration has frozen a sequence, its blocks cannot be added to, freed, shared or pinned: such
    calls raise FrozenSequenceError, an `InvalidArgumentError`. It is neither evicted nor moved by compaction.
    """

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        *,
        device_id: int = 0,
        storage: "BlockStorage | None" = None,
        block_bytes: int = 0,
        reserved_blocks: int = 0,
        max_pinned_blocks: int | None = None,
        eviction_policy: EvictionPolicy | None = LRUEviction(),  # noqa: B008 (stateless)
        on_evicted: Callable[[SequenceId, list[BlockId]], object] | None = None,
        on_moved: Callable[[Relocation], object] | None = None,
        migration_hook: Callable[[BlockAllocationRequest, int], object] | None = None,
        migration_threshold: int = 0,
        run_length: int = DEFAULT_RUN_LENGTH,
        placement: str = "buddy",
        enable_caching: bool = True,
        enable_kv_cache_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
        policy: "str | Callable[[], CachePolicy] | None" = None,
        live_curve: bool = False,
    ) -> None:
        # Compaction plans in NumPy, whose first import takes 100 ms: too long with the lock held.
        import numpy  # noqa: F401

        total_blocks = as_count("total_blocks", total_blocks, 1)
        block_size = as_int("block_size", block_size)
        device_id = as_int("device_id", device_id)
        block_bytes = as_count("block_bytes", block_bytes)
        reserved_blocks = as_int("reserved_blocks", reserved_blocks)
        migration_threshold = as_int("migration_threshold", migration_threshold)
        run_length = as_count("run_length", run_length, 1)
        if max_pinned_blocks is not None:
            max_pinned_blocks = as_count("max_pinned_blocks", max_pinned_blocks)
        if block_size < 1:
            raise InvalidArgumentError(f"block_size is {block_size}; a block has at least 1 token")
        if not 0 <= reserved_blocks <= total_blocks:
            raise InvalidArgumentError(f"{reserved_blocks} of {total_blocks} blocks cannot be reserved")
        if not 0 <= migration_threshold <= total_blocks or (migration_threshold and migration_hook is None):
            raise InvalidArgumentError(
                f"migration_threshold is {migration_threshold} of {total_blocks} blocks; it is 0 to all of "
                f"them, and needs a migration_hook, such as MigrationHook"
            )
        if storage is not None and storage.num_blocks <= total_blocks:
            raise InvalidArgumentError(
                f"the storage has blocks 0 to {storage.num_blocks - 1}, the pool 1 to {total_blocks}"
            )
        self.block_size = block_size
        self.device_id = device_id
        self.block_bytes = block_bytes if storage is None else storage.block_bytes
        self.migration_threshold = migration_threshold
        self.run_length = run_length
        self.block_pool = RunBlockPool(
            total_blocks + 1,
            enable_caching,
            block_size,
            enable_kv_cache_events=enable_kv_cache_events,
            dense_events=True,
            clock=clock,
            placement=placement,
            policy=policy,
            live_curve=live_curve,
        )
        self.storage = storage
        self._on_moved = on_moved
        self._migration_hook = migration_hook
        self._clock = clock
        self.lock = PoolLock()  # reentrant, so that callbacks may query the pool
        self.holdings = Holdings(self.block_pool, max_pinned_blocks, clock, device_id)
        self._allocation = Allocation(
            self.block_pool,
            self.holdings,
            eviction_policy,
            on_evicted,
            reserved_blocks,
            self._copy_moves,
            None if on_moved is None else self._note_moved,
        )
        self._routes: MigrationRoutes | None = None
        self.latencies = {call: LatencyWindow() for call in ("take", "free", "lookup")}
        self._allocation_latency = self.latencies["take"]
        self._freeing_latency = self.latencies["free"]
        self._num_looked_up_blocks = 0
        self._num_hit_blocks = 0

    @property
    def total_blocks(self) -> int:
        """The number of blocks, without the null block."""
        return len(self.block_pool.blocks) - 1

    @property
    def reserved_blocks(self) -> int:
        return self._allocation.reserved_blocks

    @reserved_blocks.setter
    def reserved_blocks(self, reserved_blocks: int) -> None:
        self._allocation.reserved_blocks = reserved_blocks

    def __repr__(self) -> str:
        num_free = self.get_free_blocks()
        return (
            f"<{type(self).__name__} of {self.total_blocks} blocks on device {self.device_id}: "
            f"{num_free} free, {self.total_blocks - num_free} in use by "
            f"{len(self.holdings.holders)} sequences, {self.num_pinned_blocks} pinned>"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self)

    def repair(self) -> None:
        """Make the pool whole after a call that was interrupted. May be called again if it is interrupted.

        Every sequence keeps its blocks and pins; blocks of the interrupted call may be among them. All blocks
        that neither a sequence nor a hold has become free, and the prefix cache is empty: one
        `AllBlocksCleared`. If a compaction was interrupted, ids may have changed: read `blocks_of`.

        Do not hold the lock of a connected pool. Cost: O(blocks of the pool).
        """
        with self.lock:
            self.block_pool.is_changing = True
            self.block_pool.holds.begin_repair()  # sites of migrations may remove blocks from sequences
            self.block_pool.repair(self.holdings.repair())
        if self._routes is not None:
            self._routes.repair()

    # ---- allocating --------------------------------------------------------------------------------

    def allocate(self, request: BlockAllocationRequest) -> list[BlockId]:
        """Allocate blocks and append them to a sequence.

        Takes the first of these that is there, see `Allocation`:

            1  the ids after the sequence's last block if they are empty, else a free run by `placement`
            2  compaction: a run cleared by moving at most `max_moves` blocks, if the pool has `on_moved`
            3  any free blocks, unless a run is required
            4  eviction: evict sequences in the order of `eviction_policy`, then again from 1
            5  migration: call the migration hook, then again from 1, once
            6  refusal: PoolExhaustedError

        Returns:
            `num_blocks` ids in the order of the sequence; no other sequence holds them.
        Raises:
            PoolExhaustedError: too few blocks, or no run where one is required; also a `MemoryError`. The
                message lists what was tried. Nothing has changed, but sequences may have been evicted in vain
                if `on_evicted` has taken or pinned blocks.
            EvictedSequenceError: the sequence was evicted, see `take_evictions`; also a `MemoryError`.
                Nothing has changed.
            PinLimitError: a pinned request would exceed the pin limit. Nothing has changed, unless it is
                `on_evicted` or `on_moved` that has pinned blocks: sequences that were evicted for the request
                stay evicted, and moves are complete.
            UnknownDeviceError, InvalidArgumentError, InvalidTypeError: nothing has changed.
            CopyFailedError: copying blocks out of the way failed. No block has moved; sequences that were
                already evicted stay evicted.
            Any exception of `on_evicted`: sequences that it was called for before are evicted. Of a reuse
                watcher: call `repair`. Of `on_moved`: the moves are complete.
            PoolInterruptedError: an earlier call was interrupted, or a callback's call was, and the callback
                caught that: call `repair`. All calls that change the pool raise it.
        Cost: O(num_blocks), under pressure O(blocks of the pool).
        """
        started_ns = 0 if self._allocation_latency.number_call() % TIMED_EVERY else perf_counter_ns()
        try:
            request = as_request(request)
            if self._migration_hook is not None:
                return self._allocate_with_hook([request], [], partial(self._append, request))
            with self.lock:
                return list_ids(self._allocation.append(request))
        finally:
            if started_ns:
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
        with self.lock:
            rate = self.block_pool.track_fragmentation_rate(self.run_length)
        return AllocationResult(
            success=error is None,
            block_ids=ids,
            allocated_memory=len(ids) * self.block_bytes,
            allocation_time=(ended - started) * 1000,
            fragmentation_rate=rate,
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
        if self._migration_hook is not None and requests:
            return self._allocate_with_hook(
                requests, done, lambda tried: self._allocation.append_all(requests, done, tried)
            )
        with self.lock:
            return self._allocation.append_all(requests, done)

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
            self._check_new(child_id, "fork() creates a new sequence")
            count = len(parent.blocks) if num_blocks is None else num_blocks
            if not 0 <= count <= len(parent.blocks):
                raise InvalidArgumentError(
                    f"sequence {parent_id} has {len(parent.blocks)} blocks; {count} of them cannot be shared"
                )
            shared = list(parent.blocks)[:count]
            self.holdings.evictions.begin(child_id)
            self._share(Holder(child_id, parent.priority, self._clock()), shared)
            return list_ids(shared)

    # ---- freeing and evicting ----------------------------------------------------------------------

    def free(self, block_ids: Sequence[BlockId], sequence_id: SequenceId | None = None) -> None:
        """Release blocks of sequence `sequence_id`; None: each from the sequence that has held it longest.

        A block that no sequence holds any more is free. A cached one can be hit until it is reused.

        Raises:
            InvalidBlockError: a block does not exist, is free, is listed twice, or is not held by that
                sequence.
            EvictedSequenceError: that sequence was evicted. Without `sequence_id`: a block was held by an
                evicted sequence, see `take_evictions`, so the caller may mean that sequence's block.
            PinnedBlockError: a pinned block would become free. In all cases nothing has changed.
        Cost: O(len(block_ids)).
        """
        started_ns = 0 if self._freeing_latency.number_call() % TIMED_EVERY else perf_counter_ns()
        try:
            with self.lock:
                drops = self.holdings.find_drops(block_ids, sequence_id)
                self.block_pool.holds.check_whole()
                self.holdings.drop(*drops)
        finally:
            if started_ns:
                self._freeing_latency.note(perf_counter_ns() - started_ns)

    def free_many(self, batches: Sequence[Sequence[BlockId]]) -> None:
        """Like `free` for the blocks of all batches together, all or none; no block may be listed twice."""
        listed = as_list("batches", batches)
        self.free([block_id for batch in listed for block_id in as_list("batches", batch)])

    def free_sequence(self, sequence_id: SequenceId) -> int:
        """Release all blocks of a sequence.

        Returns:
            How many blocks became free; other sequences still hold the rest.
        Raises:
            UnknownSequenceError: the sequence holds no blocks, such as after an earlier call.
            EvictedSequenceError: the sequence was evicted; results computed from its blocks may be wrong.
                This notifies its owner: the id may be used again.
            PinnedBlockError: a pinned block would become free. In all cases no block has changed.
        """
        started_ns = 0 if self._freeing_latency.number_call() % TIMED_EVERY else perf_counter_ns()
        try:
            with self.lock:
                self.block_pool.holds.check_whole()
                try:
                    sequence = self.holdings.find_usable(sequence_id)
                except EvictedSequenceError:
                    self.holdings.evictions.forget(sequence_id)
                    raise
                num_free = self.block_pool.get_num_free_blocks()
                blocks = list(sequence.blocks)
                self.holdings.drop(blocks, {sequence: blocks})
                return self.block_pool.get_num_free_blocks() - num_free
        finally:
            if started_ns:
                self._freeing_latency.note(perf_counter_ns() - started_ns)

    def evict(self, num_blocks: int) -> list[SequenceId]:
        """Evict as few sequences as free `num_blocks` more, in the eviction policy's order.

        Uses the LRU policy if the pool has none. Returns the ids of the evicted sequences; the caller
        notifies their owners. Returns [] with nothing changed if evicting all candidates would not suffice.
        """
        num_blocks = as_count("num_blocks", num_blocks)
        with self.lock:
            self.block_pool.holds.check_whole()
            return self._allocation.evict(self.holdings.choose_victims(URGENT, (), num_blocks) or [])

    def take_evictions(self) -> list[Eviction]:
        """Return the sequences evicted since the last call, oldest first, and forget them.

        `on_evicted`, or else this call, notifies the owner of a sequence that `allocate` evicted. Until then,
        or until `free_sequence` has raised for it, calls that name the sequence raise EvictedSequenceError.
        Without `sequence_id`, `free`, `pin`, `unpin` and `migrate_blocks` also raise it for the sequence's
        block ids, and for the ids these blocks were moved to. Sequences that have started again are not
        returned. The pool keeps at most 65,536 evictions.

        Afterwards a stale block id is refused only while the block is free. Once the block is allocated
        again, its id means the new holder's block: pass `sequence_id` where ids may be stale.
        """
        with self.lock:
            return self.holdings.evictions.take_all()

    def list_victims(
        self, num_blocks: int, priority: int = URGENT, sequence_id: SequenceId | None = None
    ) -> list[SequenceId]:
        """Return the sequences to evict for `num_blocks` more free blocks, in eviction order.

        Uses the LRU policy if the pool has none. Returns all candidates if evicting them would not suffice.

        Args:
            priority: of the request; sequences of higher priority are excluded.
            sequence_id: the request's own sequence, also excluded.
        Raises:
            PoolInterruptedError: as `allocate`. The order of evictions may be incomplete.
        """
        num_blocks = as_count("num_blocks", num_blocks)
        priority = as_priority(priority)
        spared = () if sequence_id is None else (as_sequence_id("sequence_id", sequence_id),)
        with self.lock:
            self.block_pool.holds.check_whole()
            chosen = self.holdings.choose_victims(priority, spared, num_blocks)
            victims = self.holdings.iter_candidates(priority, spared) if chosen is None else chosen
            return [victim.sequence_id for victim in victims]

    def note_access(self, sequence_id: SequenceId) -> None:
        """Mark a sequence as the most recently used: an LRU policy evicts it last.

        Raises:
            UnknownSequenceError: the sequence holds no blocks.
        """
        with self.lock:
            self.block_pool.holds.check_whole()
            self.holdings.note_access(self.holdings.find(sequence_id))

    # ---- pinning -----------------------------------------------------------------------------------

    def pin(self, block_ids: Sequence[BlockId], sequence_id: SequenceId | None = None) -> None:
        """Pin blocks: they are not evicted, moved or migrated until each is unpinned as often.

        Args:
            sequence_id: the sequence that must hold the blocks and in whose name they are pinned: when it
                releases a block that others still hold, these pins end. None: until unpinned.
        Raises:
            InvalidBlockError: a block does not exist, is free, or is not held by that sequence.
            EvictedSequenceError: as `free`.
            PinLimitError: the pin limit would be exceeded. In all cases nothing has changed.
        """
        with self.lock:
            blocks, holder = self.holdings.find_named(block_ids, sequence_id)
            self.holdings.check_not_frozen(blocks)
            self.block_pool.holds.check_whole()
            self.holdings.pins.pin(blocks, holder)

    def unpin(self, block_ids: Sequence[BlockId], sequence_id: SequenceId | None = None) -> None:
        """Remove one pin from each block.

        Args:
            sequence_id: the sequence that must hold the blocks; its pins are removed first. None: pins in no
                name first, then those of the sequence that has held the block longest.
        Raises:
            InvalidBlockError: a block does not exist, has fewer pins, or is not held by that sequence.
            EvictedSequenceError: as `free`. In all cases nothing has changed.
        """
        with self.lock:
            named = self.holdings.find_named(block_ids, sequence_id)
            self.block_pool.holds.check_whole()
            self.holdings.pins.unpin(*named, self.holdings.holders_of)

    @property
    def num_pinned_blocks(self) -> int:
        return len(self.holdings.pins)

    # ---- the prefix cache --------------------------------------------------------------------------

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
            num_hashes = len(block_hashes)
            if num_hashes > len(blocks):
                raise InvalidArgumentError(
                    f"{num_hashes} hashes for the {len(blocks)} blocks of sequence {sequence_id}"
                )
            if token_ids is not None and len(token_ids) < num_hashes * self.block_size:
                raise InvalidArgumentError(
                    f"{len(token_ids)} token ids for {num_hashes} blocks of {self.block_size} tokens"
                )
            num_cached = 0
            while num_cached < num_hashes and blocks[num_cached].block_hash is not None:
                num_cached += 1
            # A cached block may follow one that is not cached, for example after a migration.
            is_bare = [block.block_hash is None for block in blocks[num_cached:num_hashes]]
            self.block_pool.cache_full_blocks(
                KnownTokens(block_hashes, token_ids or []),
                blocks,
                num_cached,
                num_hashes,
                self.block_size,
                GroupId(0),
                is_bare,
            )

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
        # Numbering the calls would cost a short look-up 2 %.
        started_ns = 0 if self._num_looked_up_blocks % _TIMED_LOOKUPS else perf_counter_ns()
        sequence_id = as_new_id("sequence_id", sequence_id)
        block_hashes = as_list_of("block_hashes", block_hashes, bytes)
        priority = as_priority(priority)
        if priority != NORMAL:
            import_retention()
        with self.lock:
            self._check_new(sequence_id, "claim its prefix first")
            self.holdings.evictions.begin(sequence_id)
            hits = self.block_pool.find_cached_prefix(block_hashes, len(block_hashes))
            self._num_looked_up_blocks += len(block_hashes)
            self._num_hit_blocks += len(hits)
            self._share(Holder(sequence_id, priority, self._clock()), hits)
            if started_ns:
                self.latencies["lookup"].note(perf_counter_ns() - started_ns)
            return list_ids(hits)

    @property
    def retention(self) -> "BlockRetention":
        """The retention of cached blocks: directives and sessions that make some be reused later or earlier.

        Its request ids are `str(sequence_id)`; its token positions follow `blocks_of`. Each allocation
        handles expired timers. Calls on it are not locked: hold `lock`. Created on first access.
        """
        with self.lock:
            return self.holdings.open_retention()

    def take_events(self) -> list[KVCacheEvent]:
        """Return the cache events since the last call, oldest first, and forget them.

        Always [] without `enable_kv_cache_events`. With it, events accumulate until this call.
        """
        with self.lock:
            return self.block_pool.take_events()

    def dump(
        self,
        path: "str | PathLike[str]",
        *,
        layout: "BlockLayout | None" = None,
        stream_state: "StreamState | None" = None,
    ) -> "PoolDumpHeader":
        """Write the prefix cache to a file, with its bytes if there is a storage. See `tiers.pool_dump`.

        The pool is locked meanwhile. The file does not record which sequences hold which blocks.
        """
        from kv_pool.tiers.pool_dump import dump_pool

        with self.lock:
            return dump_pool(
                path, self.block_pool, storage=self.storage, layout=layout, stream_state=stream_state
            )

    def load(self, path: "str | PathLike[str]", *, layout: "BlockLayout | None" = None) -> "LoadedPool":
        """Load the prefix cache from a file of `dump`, before the first sequence. See `tiers.pool_dump`."""
        from kv_pool.tiers.pool_dump import load_pool

        with self.lock:
            return load_pool(path, self.block_pool, storage=self.storage, layout=layout)

    # ---- queries -----------------------------------------------------------------------------------

    def blocks_of(self, sequence_id: SequenceId) -> list[BlockId]:
        """Return the block ids of a sequence in the order of its tokens; [] if it holds none.

        Raises:
            EvictedSequenceError: the sequence was evicted, see `take_evictions`.
        """
        with self.lock:
            sequence_id = as_sequence_id("sequence_id", sequence_id)
            sequence = self.holdings.holders.get(sequence_id)
            if sequence is None:
                self.holdings.evictions.check(sequence_id)
                return []
            return [block.block_id for block in sequence.blocks]

    def list_sequences(self) -> list[SequenceId]:
        """Return the ids of the sequences that hold blocks, the least recently accessed first."""
        with self.lock:
            return list(self.holdings.holders)

    def get_block_info(self, block_id: BlockId) -> BlockInfo:
        """Return a description of a block, free or in use.

        Raises:
            InvalidBlockError: no such block. The null block, 0, is not accepted either.
        """
        with self.lock:
            block = self.holdings.find_block(block_id)
            block_id = block.block_id
            holders = self.holdings.holders_of.get(block, ())
            return BlockInfo(
                block_id=block_id,
                ref_count=block.ref_cnt - (block in self.holdings.pins),
                sequence_id=next((holder.sequence_id for holder in holders), NO_SEQUENCE),
                device_id=self.device_id,
                is_pinned=block in self.holdings.pins,
                last_access_time=max((holder.last_access_time for holder in holders), default=0.0),
                sequence_ids=tuple(holder.sequence_id for holder in holders),
            )

    @property
    def block_info(self) -> "BlockInfos":
        """A live mapping from block id to `BlockInfo`, of the blocks that sequences hold."""
        return BlockInfos(self)

    def get_free_blocks(self) -> int:
        """Return how many blocks are free, including the reserve and cached blocks that are not in use."""
        self._expire_claims()
        return self.block_pool.get_num_free_blocks()

    def count_available(self, priority: int) -> int:
        """Return how many blocks a request of this priority can take; negative if the reserve is in use."""
        if type(priority) is not int:
            priority = as_priority(priority)
        self._expire_claims()
        return self._allocation.count_available(priority)

    def _list_ids(self) -> list[SequenceId]:
        return list(self.holdings.holders)

    def _get_rows(self, sequence_id: SequenceId) -> list[Collection[KVCacheBlock]] | None:
        holder = self.holdings.holders.get(sequence_id)
        return None if holder is None else [holder.blocks]

    def report_sequence(self, sequence_id: SequenceId, num_blocks: int, num_immovable: int) -> SequenceReport:
        holder = self.holdings.holders[sequence_id]
        return SequenceReport(
            sequence_id,
            num_blocks,
            holder.priority,
            self._clock() - holder.last_access_time,
            sequence_id in self.holdings.frozen,
            num_immovable_blocks=num_immovable,
        )

    def count_use(self) -> dict[str, Any]:
        self._expire_claims()
        return super().count_use() | {
            "pinned_blocks": len(self.holdings.pins),
            "reserved_blocks": self.reserved_blocks,
            "num_sequences": len(self.holdings.holders),
            "evicted_sequences": self._allocation.num_evicted,
            "looked_up_blocks": self._num_looked_up_blocks,
            "hit_blocks": self._num_hit_blocks,
        }

    def get_time(self) -> float:
        """Return the time of the pool's clock in seconds."""
        return self._clock()

    # ---- compaction and size -----------------------------------------------------------------------

    def defragment(
        self, max_evictions: int = 0, max_moves: int | None = None, goal: float | None = None
    ) -> int:
        """Move blocks in use together so that free blocks become contiguous. Block ids of sequences change.

        Learn the new ids from `on_moved` or `blocks_of`. Without a goal, all blocks in use move to the lowest
        ids. With a goal, the pool moves only as many blocks as needed, from the emptiest stretches of
        `run_length` ids, and most sequences keep their runs. Pinned, held and watched blocks stay in place.
        Sequences, references, hashes and the eviction order do not change. By default nothing is evicted: in
        a full cache, blocks in use and cached blocks exchange places. To compact by threshold, or a little in
        each engine step, see `Defragmenter`.

        Args:
            max_evictions: cached blocks that may be evicted where empty blocks are missing; each takes one
                copy instead of the three of an exchange.
            max_moves: stop after this many; the next call continues. An exchange counts as two moves, so 1
                moves nothing in a full cache.
            goal: the fragmentation rate to reach, 0 to 1.
        Returns:
            How many blocks changed their id.
        Raises:
            CopyFailedError: a batch of moves failed, see `compaction.apply_moves`. Sequences keep their
                bytes; cached blocks that were being exchanged may be evicted.
        """
        with self.lock:
            self.block_pool.holds.check_whole()
            return compaction.compact(
                self.block_pool,
                self._copy_moves,
                run_length=self.run_length,
                goal=goal,
                max_moves=max_moves,
                max_evictions=max_evictions,
                on_moved=self._note_moved,
                scratch_ids=compaction.NULL_BLOCK_SLOT if self.storage is None else self.storage.scratch_ids,
            )

    def grow(self, num_blocks: int) -> None:
        """Add `num_blocks` free, empty blocks with the highest ids. O(blocks of the pool).

        Raises:
            InvalidArgumentError: `num_blocks` is negative, or the storage is too small. Nothing has changed.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        with self.lock:
            if self.storage is not None and self.storage.num_blocks <= self.total_blocks + num_blocks:
                raise InvalidArgumentError(
                    f"the storage has blocks 0 to {self.storage.num_blocks - 1}; with {num_blocks} more the "
                    f"pool would have 1 to {self.total_blocks + num_blocks}"
                )
            self.block_pool.add_blocks(num_blocks)

    def shrink(self, num_blocks: int) -> None:
        """Remove the `num_blocks` highest ids; blocks in use there move to lower ids. O(blocks of the pool).

        A full cache evicts as many cached blocks, next in eviction order; other cached blocks of the removed
        range also move to lower ids. Block ids of sequences change: see `on_moved`.

        Raises:
            InvalidArgumentError: `num_blocks` is negative, or fewer than 1 or than the reserve would be left.
            OutOfBlocksError: more blocks are in use in the removed range than are free below it.
            InvalidBlockError: a block to remove is pinned, held or watched. In all cases nothing has changed.
            CopyFailedError: nothing has moved; blocks that were next in eviction order may be evicted.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        with self.lock:
            num_left = self.total_blocks - num_blocks
            if num_blocks < 0 or num_left < max(1, self.reserved_blocks):
                raise InvalidArgumentError(
                    f"{num_blocks} of {self.total_blocks} blocks cannot be removed; at least "
                    f"{max(1, self.reserved_blocks)} must be left"
                )
            self.block_pool.holds.check_whole()
            compaction.shrink(self.block_pool, num_blocks, self._copy_moves, on_moved=self._note_moved)

    # ---- migration ---------------------------------------------------------------------------------

    def connect(self, peer: "GPUKVPool") -> None:
        """Allow blocks to migrate between this pool and another pool of this process, in both directions.

        Raises:
            InvalidArgumentError: a device id is in use already, or block sizes differ. Nothing has changed.
        """
        check_type("peer", peer, GPUKVPool)
        self._open_routes().connect(peer._open_routes())

    def attach(self, migrator: "Migrator", devices: dict[int, NodeName]) -> None:
        """Allow blocks to migrate to other nodes; each node becomes a device of this pool.

        Args:
            migrator: the migrator of this pool, over a `PoolSite` of it; it resolves node names.
            devices: maps device id to node name.
        Raises:
            InvalidArgumentError: this pool or a connected one has such a device id. Nothing has changed.
        """
        self._open_routes().attach(migrator, devices)

    def count_free_elsewhere(self) -> dict[int, int]:
        """Return the number of free blocks of each connected pool, less its reserve, by device id."""
        return self._open_routes().count_free()

    def migrate_blocks(self, block_ids: Sequence[BlockId], target_device_id: int) -> list[BlockId]:
        """Move blocks with their bytes to a connected pool or an attached node.

        Each block migrates with the sequence that has held it longest, and is appended to that sequence's
        blocks on the target. Other sequences that share the block keep it here. A cached block is also cached
        on the target, if that pool caches; the old block keeps its hashes until it is reused.

        Returns:
            The ids on the target, in the same order.
        Raises:
            UnknownDeviceError: the device is not connected.
            InvalidBlockError: a block is free, unknown or listed twice.
            EvictedSequenceError: a block was held by an evicted sequence, see `take_evictions`.
            PinnedBlockError: a block is pinned.
            PoolExhaustedError: the target has too few free blocks; it evicts nothing for a migration.
            InvalidArgumentError: one of the pools has no storage, or the block formats differ.
            FrozenSequenceError: another migration has frozen one of the sequences.
            CopyFailedError: copying failed.
            MigrationError: the node could not take the blocks. In all cases nothing has changed on either
                side.

        Migrating to a node waits for the transfer: do not hold the pool's lock.
        """
        target_device_id = as_int("target_device_id", target_device_id)
        return self._open_routes().migrate(
            cast("list[BlockId]", as_ints("block_ids", block_ids)), target_device_id
        )

    def try_migrate_blocks(self, block_ids: Sequence[BlockId], target_device_id: int) -> MigrationResult:
        """Like `migrate_blocks`, but return a `KVPoolError` as a result.

        Raises:
            InvalidTypeError, PoolInterruptedError: as `migrate_blocks`.
        """
        started = self._clock()
        try:
            migrated = self.migrate_blocks(block_ids, target_device_id)
        except (InvalidTypeError, PoolInterruptedError):
            raise
        except KVPoolError as error:
            return MigrationResult(False, migration_time=(self._clock() - started) * 1000, error=error)
        elapsed = (self._clock() - started) * 1000
        return MigrationResult(True, migrated, elapsed, len(migrated) * self.block_bytes)

    def migrate_sequence(
        self, sequence_id: SequenceId, target_device_id: int
    ) -> tuple[list[BlockId], list[BlockId]]:
        """Move a sequence with all its blocks to a connected pool or an attached node, under the same id.

        Returns:
            The old block ids and the new ones on the target, in the order of the tokens.
        Raises:
            As `migrate_blocks`, and UnknownSequenceError: the sequence holds no blocks; InvalidArgumentError:
            the target already has a sequence with this id. Nothing has changed.

        Other sequences keep the blocks that they share with it.
        """
        target_device_id = as_int("target_device_id", target_device_id)
        return self._open_routes().migrate_sequence(
            as_sequence_id("sequence_id", sequence_id), target_device_id
        )

    # ---- internals, called with the lock held unless stated otherwise ------------------------------

    def _allocate_with_hook(
        self,
        requests: list[BlockAllocationRequest],
        done: list[list[KVCacheBlock]],
        append: Callable[[Sequence[str]], Ids],
    ) -> Ids:
        """Call the migration hook before too few blocks would be left, and when the request is refused.

        The pool is not locked: the hook may wait for another pool, whose hook may wait for this one.

        Args:
            done: one entry for each request that `append` has served before it raises.
            append: allocates the blocks of all requests, with the lock held; takes what was already tried.
        """
        hook = self._migration_hook
        assert hook is not None
        num_blocks = sum(request.num_blocks for request in requests)
        if num_blocks > self.total_blocks:
            hook = None
        elif self.migration_threshold:
            num_missing = num_blocks + self.migration_threshold - self.get_free_blocks()
            if num_missing > 0:
                hook(requests[0], num_missing)
        try:
            with self.lock:
                return append(())
        except PoolExhaustedError:
            if hook is None:
                raise
            refused = requests[len(done)]
            num_missing = num_blocks - self.count_available(refused.priority)
        done.clear()
        hook(refused, max(0, num_missing))
        with self.lock:
            return append(["the migration hook"])

    def _append(self, request: BlockAllocationRequest, tried: Sequence[str]) -> list[BlockId]:
        """Allocate the blocks of one request; called by `_allocate_with_hook`."""
        return list_ids(self._allocation.append(request, (), tried))

    def _check_new(self, sequence_id: SequenceId, hint: str) -> None:
        """Raise unless a new sequence may have this id, as far as it was not evicted."""
        self.block_pool.holds.check_whole()
        self.holdings.check_usable(sequence_id)
        if sequence_id in self.holdings.holders:
            raise InvalidArgumentError(f"sequence {sequence_id} already holds blocks; {hint}")

    def _share(self, sequence: Holder, blocks: list[KVCacheBlock]) -> None:
        """Add one reference to each block and enter a new sequence that holds them; no-op without blocks."""
        if not blocks:
            return
        pool = self.block_pool
        pool.is_changing = True
        touch_listed(pool, blocks)
        self.holdings.hold(sequence, blocks)
        pool.is_changing = False

    def _open_routes(self) -> "MigrationRoutes":
        """Return the ways to other pools and nodes. The first call creates them, locked or not."""
        if self._routes is None:
            from kv_pool.adapter.migration_routes import MigrationRoutes

            with self.lock:
                if self._routes is None:
                    self._routes = MigrationRoutes(self)
        return self._routes

    def _expire_claims(self) -> None:
        """Handle expired timers of the retention: blocks whose retention pins expired become free."""
        if self.holdings.retention is not None:
            with self.lock:
                self.holdings.retention.expire()

    def _copy_moves(self, moves: Sequence[BlockMove]) -> None:
        if self.storage is not None:
            self.storage.apply_moves(moves)

    def _note_moved(self, relocation: Relocation) -> None:
        self.num_moved_blocks += len(relocation.moves)
        self.holdings.evictions.note_moved(relocation.moves)
        if self._on_moved is not None:
            self._on_moved(relocation)


class BlockInfos(Mapping[BlockId, BlockInfo]):
    """A live, read-only mapping from id to `BlockInfo`, lowest id first, of the blocks that sequences hold.

    An iteration covers the blocks that were held when it began; `items()` and `values()` are snapshots. Each
    is O(blocks in use); use `blocks_of(sequence_id)` for the blocks of one sequence.
    """

    def __init__(self, pool: GPUKVPool) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return len(self._pool.holdings.holders_of)

    def __iter__(self) -> Iterator[BlockId]:
        with self._pool.lock:
            return iter(sorted(block.block_id for block in self._pool.holdings.holders_of))

    def __getitem__(self, block_id: BlockId) -> BlockInfo:
        try:
            info = self._pool.get_block_info(block_id)
        except InvalidBlockError:
            raise KeyError(block_id) from None
        if not info.sequence_ids:
            raise KeyError(block_id)
        return info

    def items(self) -> ItemsView[BlockId, BlockInfo]:
        """Return a snapshot of ids and infos."""
        return self._copy().items()

    def values(self) -> ValuesView[BlockInfo]:
        """Return a snapshot of the infos."""
        return self._copy().values()

    def _copy(self) -> dict[BlockId, BlockInfo]:
        with self._pool.lock:
            return {block_id: self._pool.get_block_info(block_id) for block_id in self}
