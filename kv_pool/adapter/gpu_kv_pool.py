"""`GPUKVPool`: `KVPoolProtocol` over a block pool that knows its runs. Thread-safe.

Over 450 lines because it is the whole surface of the adapter in one class, with its contracts; most of what
its methods do is in the files beside it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, NoReturn, SupportsIndex

import msgspec

from kv_pool.adapter.allocation import Allocation, as_request, check_priority
from kv_pool.adapter.block_infos import BlockInfos
from kv_pool.adapter.holdings import Holder, Holdings, as_new_id, as_sequence_id
from kv_pool.adapter.migration_routes import MigrationRoutes
from kv_pool.adapter.pins import Pins
from kv_pool.adapter.prefixes import cache_prefix
from kv_pool.adapter.recovering_lock import Aborting, RecoveringLock
from kv_pool.adapter.victims import EvictionPolicy, LRUEviction, Victims
from kv_pool.contiguous import compaction
from kv_pool.contiguous.compaction import Relocation
from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH, RunBlockPool
from kv_pool.core.arguments import as_int, as_ints, as_list, as_list_of, check_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.identity import refuse_copy
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.errors import (
    EvictedSequenceError,
    InvalidArgumentError,
    InvalidTypeError,
    KVPoolError,
    PoolExhaustedError,
    UnknownDeviceError,
)
from kv_pool.ids import BlockHash, BlockMove
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.metrics.latency import TIMED_EVERY, LatencyWindow
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
from kv_pool.reports.layout import PoolLayout, read_layout
from kv_pool.reports.sequences import SequenceList, SequenceReport
from kv_pool.reports.statistics import PoolStatistics, read_statistics

if TYPE_CHECKING:
    from os import PathLike

    from kv_pool.events.resident_state import ResidentState
    from kv_pool.migration.migrator import Migrator
    from kv_pool.storage.block_layout import BlockLayout
    from kv_pool.storage.block_storage import BlockStorage
    from kv_pool.tiers.dump.dump_reader import PoolDumpHeader
    from kv_pool.tiers.pool_dump import LoadedPool

_NONE: frozenset[int] = frozenset()


class GPUKVPool(KVPoolProtocol):
    """The blocks of one device, handed out to sequences by id.

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

    Block ids run from 1 to `total_blocks`; 0 is the null block, so a storage has one block more.

    A pool that runs full evicts sequences that are not pinned, those used longest ago first, see `allocate`;
    with `eviction_policy=None` it refuses instead. A call for an evicted one raises EvictedSequenceError.

    Args:
        block_size: tokens per block.
        device_id: of this pool; distinct among pools that are connected.
        storage: the bytes of the blocks. Without one, the caller copies them in `on_moved`, all moves at
            once as `BlockStorage.apply_moves` does, or there are none, and nothing can be migrated.
        block_bytes: for `AllocationResult`, where there is no storage.
        reserved_blocks: free blocks that requests of priority 0 leave alone.
        max_pinned_blocks: how many blocks may be pinned at once; None for all, however many they become.
        eviction_policy: which sequences lose their blocks to a request that finds too few: by default those
            of the lowest priority that were used longest ago. None: no sequence is evicted.
        on_evicted: called with a sequence's id and its block ids before it loses them, while the pool is
            locked: take note, do not wait for another thread. Without it, see `take_evictions`.
        on_moved: called with a `Relocation` when ids have changed, before any old id can be taken; locked,
            too. Without it ids change in `defragment` only.
        migration_hook: called with the request that is about to be refused, and how many blocks it lacks (in
            `allocate_many`, how many the batch lacks); the pool is not locked. It may free or migrate blocks;
            then the request, or the batch, is tried once more. See `OffloadHook`.
        offload_threshold: blocks. The migration hook is called before a request would leave fewer than this
            free, too, and so before a sequence is evicted for it.
        run_length: what `get_fragmentation_rate` is about.
        placement: where runs are taken: "buddy", "first_fit" or "oldest", see `RunBlockPool`.
        enable_caching: freed blocks keep their hashes until they are taken.
        enable_kv_cache_events: note which blocks become cached and which are evicted, for `take_events`.
        clock: seconds, for `last_access_time` and the times in results.

    Attributes:
        block_pool: the pool underneath, for its prefix cache, its holds and its invariants. Blocks that are
            taken there belong to no sequence; they move as others do unless they are held
            (`block_pool.hold`). Calls on it are not locked.
        lock: held during each call, reentrant; for whoever needs several calls to be one.
        storage: as given.
        holdings: of use to what else belongs to the adapter, with the lock held.

    Priorities: 1 and 2 may use the reserve, no request evicts a sequence of higher priority, and what a
    sequence of higher priority gave back is kept in the cache longer.

    While a migration has a sequence, nobody adds to it, frees, shares or pins it: FrozenSequenceError, an
    `InvalidArgumentError`. It is neither evicted nor moved by a compaction.
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
        on_evicted: Callable[[int, list[int]], object] | None = None,
        on_moved: Callable[[Relocation], object] | None = None,
        migration_hook: Callable[[BlockAllocationRequest, int], object] | None = None,
        offload_threshold: int = 0,
        run_length: int = DEFAULT_RUN_LENGTH,
        placement: str = "buddy",
        enable_caching: bool = True,
        enable_kv_cache_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Compaction plans in NumPy, whose first import takes 100 ms: too long with the lock held.
        import numpy  # noqa: F401

        total_blocks = as_int("total_blocks", total_blocks)
        block_size = as_int("block_size", block_size)
        device_id = as_int("device_id", device_id)
        block_bytes = as_int("block_bytes", block_bytes)
        reserved_blocks = as_int("reserved_blocks", reserved_blocks)
        offload_threshold = as_int("offload_threshold", offload_threshold)
        run_length = as_int("run_length", run_length)
        if max_pinned_blocks is not None:
            max_pinned_blocks = as_int("max_pinned_blocks", max_pinned_blocks)
        if total_blocks < 1:
            raise InvalidArgumentError(f"total_blocks is {total_blocks}; a pool hands out at least 1 block")
        if not 0 <= reserved_blocks <= total_blocks:
            raise InvalidArgumentError(f"{reserved_blocks} of {total_blocks} blocks cannot be reserved")
        if not 0 <= offload_threshold <= total_blocks or (offload_threshold and migration_hook is None):
            raise InvalidArgumentError(
                f"offload_threshold is {offload_threshold} of {total_blocks} blocks; it is 0 to all of them, "
                f"and needs a migration_hook, such as OffloadHook"
            )
        if storage is not None and storage.num_blocks <= total_blocks:
            raise InvalidArgumentError(
                f"the storage has blocks 0 to {storage.num_blocks - 1}, the pool 1 to {total_blocks}"
            )
        self.total_blocks = total_blocks
        self.block_size = block_size
        self.device_id = device_id
        self.block_bytes = block_bytes if storage is None else storage.block_bytes
        self.reserved_blocks = reserved_blocks
        self.offload_threshold = offload_threshold
        self.run_length = run_length
        self.block_pool = RunBlockPool(
            total_blocks + 1,
            enable_caching,
            block_size,
            enable_kv_cache_events=enable_kv_cache_events,
            dense_events=True,
            clock=clock,
            placement=placement,
        )
        self.storage = storage
        self._on_moved = on_moved
        self._migration_hook = migration_hook
        self._clock = clock
        # Reentrant, so that callbacks may look. While an interrupted call is unfinished, `lock` is one that
        # completes the call before the next; no other call pays for that.
        self._plain_lock = threading.RLock()
        self._recovering_lock = RecoveringLock(self._plain_lock, self._recover_late)
        self.lock: threading.RLock | RecoveringLock = self._plain_lock
        self._aborting = Aborting(self._abort)
        self._pins = Pins(self.block_pool, total_blocks if max_pinned_blocks is None else max_pinned_blocks)
        self._may_pin_all = max_pinned_blocks is None
        self.holdings = Holdings(self.block_pool, self._pins, clock, device_id)
        self._victims = Victims(self.holdings, eviction_policy, on_evicted)
        self._take = Allocation(
            self.block_pool,
            self.holdings,
            self._victims,
            self.count_available,
            self._copy_moves,
            None if on_moved is None else self._note_moved,
        ).take
        # Bound here: a short call feels each step in between.
        self._holders = self.holdings.holders
        self._hold = self.holdings.hold
        self._drop = self.holdings.drop
        self._evictions = self.holdings.evictions
        self._routes = MigrationRoutes(self)
        self._allocation_latency = LatencyWindow()
        self._freeing_latency = LatencyWindow()
        # Bound here, and written out where they are called: a short call feels each step in between.
        self._number_allocation = self._allocation_latency.number_call
        self._number_freeing = self._freeing_latency.number_call
        self._num_moved_blocks = 0
        self._num_looked_up_blocks = 0
        self._num_hit_blocks = 0

    def __repr__(self) -> str:
        num_free = self.get_free_blocks()
        return (
            f"<{type(self).__name__} of {self.total_blocks} blocks on device {self.device_id}: "
            f"{num_free} free, {self.total_blocks - num_free} in use by {len(self._holders)} sequences, "
            f"{len(self._pins)} pinned>"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self)

    # ---- taking ----------------------------------------------------------------------------------

    def allocate(self, request: BlockAllocationRequest) -> list[int]:
        """Take blocks for a sequence, after those that it has.

        What comes next in the ids of a sequence that grows is tried first; then a run, see `placement`; then,
        within `max_moves`, one that is made by moving other blocks, if the pool has `on_moved`. Then:

            1  compaction     a run is required and enough blocks are free: others move out of its way
            2  eviction       too few are free, or no run: sequences that are not pinned, by `eviction_policy`
            3  migration      the migration hook is called, and the request is tried once more
            4  refusal        PoolExhaustedError

        Returns:
            `num_blocks` ids in the order of the sequence, held by nobody else.
        Raises:
            PoolExhaustedError: too few blocks, or no run where one is required; a `MemoryError`, too. It
                says what was tried. Nothing has changed.
            EvictedSequenceError: the sequence was evicted, see `take_evictions`; a `MemoryError`, too.
                Nothing has changed.
            PinLimitError, UnknownDeviceError, InvalidArgumentError, InvalidTypeError: nothing has changed.
            CopyFailedError: while moving blocks out of the way. No block has moved; sequences that were
                evicted before stay so.
            Whatever `on_evicted` raises: sequences it was told of before are evicted.
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
        """As `allocate`, with a refusal as a result instead of an error.

        Raises:
            As `allocate`, but for PoolExhaustedError, PinLimitError and CopyFailedError.
        The fragmentation rate costs O(blocks of the pool).
        """
        started = self._clock()
        ids: list[int] = []
        error = None
        try:
            ids = self.allocate(request)
        except (InvalidArgumentError, InvalidTypeError):
            raise
        except KVPoolError as refusal:
            error = refusal
        ended = self._clock()
        return AllocationResult(
            success=error is None,
            block_ids=ids,
            allocated_memory=len(ids) * self.block_bytes,
            allocation_time=(ended - started) * 1000,
            fragmentation_rate=self.get_fragmentation_rate(),
            is_contiguous=error is None and is_run(ids),
            error=error,
        )

    def allocate_many(self, requests: Sequence[BlockAllocationRequest]) -> list[list[int]]:
        """As `allocate` for each request in turn, all or none. No sequence among them is evicted for another.

        The migration hook is called with the first request that does not fit, and how many blocks all of them
        lack together; then all are tried once more.

        Raises:
            As `allocate`: all blocks are given back, those of requests before the one at fault as well; what
            was evicted or moved for those stays so.
        """
        requests = [
            as_request(request) for request in as_list_of("requests", requests, BlockAllocationRequest)
        ]
        done: list[list[KVCacheBlock]] = []
        if self.offload_threshold and requests:
            self._offload_early(requests[0], sum(request.num_blocks for request in requests))
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

    def fork(self, parent_id: int, child_id: int, num_blocks: int | None = None) -> list[int]:
        """Let a new sequence share the first `num_blocks` blocks of another one; None for all.

        Returns:
            Their ids. Whoever writes into a block with `ref_count` above 1 takes one of its own before.
        Raises:
            UnknownSequenceError: the parent holds nothing.
            InvalidArgumentError: the child holds blocks already, or the parent holds fewer.
            EvictedSequenceError: one of them was evicted, see `take_evictions`. In all cases nothing has
                changed.
        """
        with self.lock:
            parent = self.holdings.find_usable(as_sequence_id("parent_id", parent_id))
            child_id = as_new_id("child_id", child_id)
            if num_blocks is not None:
                num_blocks = as_int("num_blocks", num_blocks)
            self.holdings.check_usable(child_id)
            if child_id in self._holders:
                raise InvalidArgumentError(
                    f"sequence {child_id} holds blocks already; fork() makes a new one"
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
        sequence_id: int,
        block_hashes: Sequence[BlockHash],
        token_ids: Sequence[int] | None = None,
    ) -> None:
        """Make the first `len(block_hashes)` blocks of a sequence findable by these hashes, head first.

        Blocks that are cached already keep the hashes that they have.

        Args:
            token_ids: of these blocks, from the start of the sequence, and maybe more; for events. None:
                events name no tokens, and readers that find blocks by tokens make nothing of them.
        Raises:
            UnknownSequenceError: it holds nothing.
            InvalidArgumentError: it has fewer blocks, or the tokens are too few for the hashes. In each case
                nothing has changed.
        """
        with self.lock:
            blocks = list(self.holdings.find(sequence_id).blocks)
            block_hashes = as_list_of("block_hashes", block_hashes, bytes)
            if token_ids is not None:
                token_ids = as_ints("token_ids", token_ids)
            cache_prefix(self.block_pool, sequence_id, blocks, block_hashes, token_ids)

    def take_events(self) -> list[KVCacheEvent]:
        """What became cached and what was evicted since the last call, oldest first; theirs who call.

        Always [] without `enable_kv_cache_events`. With it, events pile up until they are taken.
        """
        with self.lock:
            return self.block_pool.take_events()

    def claim_prefix(
        self, sequence_id: int, block_hashes: Sequence[BlockHash], priority: int = NORMAL
    ) -> list[int]:
        """Let a new sequence begin with the longest prefix that is cached.

        Returns:
            The ids of its blocks, head first; [] for a miss, and then there is no such sequence yet.
        Raises:
            InvalidArgumentError: it holds blocks already, or there is no such priority.
            EvictedSequenceError: it was evicted, see `take_evictions`.
        """
        with self.lock:
            sequence_id = as_new_id("sequence_id", sequence_id)
            block_hashes = as_list_of("block_hashes", block_hashes, bytes)
            check_priority(priority)
            self.holdings.check_usable(sequence_id)
            if sequence_id in self._holders:
                raise InvalidArgumentError(f"sequence {sequence_id} holds blocks; a prefix comes first")
            self._evictions.begin(sequence_id)
            hits = self.block_pool.find_cached_prefix(block_hashes, len(block_hashes))
            self._num_looked_up_blocks += len(block_hashes)
            self._num_hit_blocks += len(hits)
            self._share(Holder(sequence_id, priority, self._clock()), hits)
            return [block.block_id for block in hits]

    def dump(
        self,
        path: "str | PathLike[str]",
        *,
        layout: "BlockLayout | None" = None,
        stream_state: "ResidentState | None" = None,
    ) -> "PoolDumpHeader":
        """Write what is cached to a file, with the bytes if there is a storage. See `tiers.pool_dump`.

        The pool is locked meanwhile. Which sequences hold what is not in the file.
        """
        from kv_pool.tiers.pool_dump import dump_pool

        with self.lock:
            return dump_pool(
                path, self.block_pool, storage=self.storage, layout=layout, stream_state=stream_state
            )

    def load(self, path: "str | PathLike[str]", *, layout: "BlockLayout | None" = None) -> "LoadedPool":
        """Have cached what a file of `dump` says, before the first sequence. See `tiers.pool_dump`."""
        from kv_pool.tiers.pool_dump import load_pool

        with self.lock:
            return load_pool(path, self.block_pool, storage=self.storage, layout=layout)

    # ---- giving back -----------------------------------------------------------------------------

    def free(self, block_ids: Sequence[int], sequence_id: int | None = None) -> None:
        """Take each block from the sequence that has held it longest, or from the one that is named.

        What nobody holds any more is free, and can be hit as long as it is not taken again.
        Raises:
            InvalidBlockError: no such block, a free one, one listed twice, or not held by that sequence.
            EvictedSequenceError: that sequence was evicted; or none is named, and a block was held by one
                that was evicted, see `take_evictions`: the ids may be meant as its.
            PinnedBlockError: a pinned block would become free. In all cases nothing has changed.
        Cost: O(len(block_ids)).
        """
        started_ns = 0 if self._number_freeing() % TIMED_EVERY else perf_counter_ns()
        try:
            with self.lock:
                self._give_back(*self.holdings.find_drops(block_ids, sequence_id))
        finally:
            if started_ns:
                self._freeing_latency.note(perf_counter_ns() - started_ns)

    def free_many(self, batches: Sequence[Sequence[int]]) -> None:
        """As `free` of all blocks of all batches, all or none; none is listed twice."""
        listed = as_list("batches", batches)
        self.free([block_id for batch in listed for block_id in as_list("batches", batch)])

    def free_sequence(self, sequence_id: int) -> int:
        """Take all its blocks from a sequence.

        Returns:
            How many became free; the others are held by other sequences as well.
        Raises:
            UnknownSequenceError: it holds nothing, such as after an earlier call.
            EvictedSequenceError: it was evicted: what was computed on its blocks may be wrong. With this its
                owner is notified, and the id may be used again.
            PinnedBlockError: a pinned block would become free. In all cases no block has changed.
        """
        started_ns = 0 if self._number_freeing() % TIMED_EVERY else perf_counter_ns()
        try:
            with self.lock:
                try:
                    sequence = self.holdings.find_usable(sequence_id)
                except EvictedSequenceError:
                    self._evictions.forget(sequence_id)
                    raise
                num_free = self.block_pool.get_num_free_blocks()
                blocks = list(sequence.blocks)
                self._give_back(blocks, {sequence: blocks})
                return self.block_pool.get_num_free_blocks() - num_free
        finally:
            if started_ns:
                self._freeing_latency.note(perf_counter_ns() - started_ns)

    def evict(self, num_blocks: int) -> list[int]:
        """Take their blocks from as few sequences as free `num_blocks` more, in the order of the policy.

        The LRU policy where the pool has none. Returns the sequences' ids, for the caller to notify their
        owners; [] with nothing changed where all that may go would not suffice.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        with self.lock, self._aborting:
            return self._victims.evict(self._victims.choose(URGENT, None, num_blocks) or [])

    def take_evictions(self) -> list[Eviction]:
        """Return the sequences that were evicted since the last call, oldest first, and forget them.

        An eviction that `allocate` needed reaches the sequence's owner by `on_evicted`, or by this call.
        Until then, or until `free_sequence` has raised for it, calls that name the sequence raise
        EvictedSequenceError, and so does `free` for its block ids where no sequence is named. A sequence
        that was begun again is not returned. 65,536 are kept at most.
        """
        with self.lock:
            return self._evictions.take_all()

    def list_victims(
        self, num_blocks: int, priority: int = URGENT, sequence_id: int | None = None
    ) -> list[int]:
        """The sequences that would lose their blocks for `num_blocks` more, the first to go first.

        In the order of the policy, the LRU policy where the pool has none; all that may go where they would
        not suffice.

        Args:
            priority: of the request; sequences of a higher one are left out.
            sequence_id: the request's own sequence, left out, too.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        check_priority(priority)
        if sequence_id is not None:
            sequence_id = as_sequence_id("sequence_id", sequence_id)
        with self.lock:
            chosen = self._victims.choose(priority, sequence_id, num_blocks)
            victims = self._victims.rank(priority, sequence_id) if chosen is None else chosen
            return [victim.sequence_id for victim in victims]

    # ---- pinning ---------------------------------------------------------------------------------

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep blocks in use where they are: not evicted, moved or migrated, until unpinned as often.

        Raises:
            InvalidBlockError: no such block, or nobody's.
            PinLimitError: too many would be pinned. In both cases nothing has changed.
        """
        with self.lock:
            blocks = self.holdings.find_held(block_ids)
            self.holdings.check_not_frozen(blocks)
            with self._aborting:
                self._pins.pin(blocks)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Take one pin off each block.

        Raises:
            InvalidBlockError: no such block, or not pinned so often. Nothing has changed.
        """
        with self.lock, self._aborting:
            self._pins.unpin(self.holdings.find_held(block_ids))

    # ---- looking ---------------------------------------------------------------------------------

    def blocks_of(self, sequence_id: int) -> list[int]:
        """Block ids of a sequence in the order of its tokens; [] if it holds none.

        Raises:
            EvictedSequenceError: it was evicted, see `take_evictions`.
        """
        with self.lock:
            if type(sequence_id) is not int:
                sequence_id = as_int("sequence_id", sequence_id)
            sequence = self._holders.get(sequence_id)
            if sequence is None:
                self._evictions.check(sequence_id)
                return []
            return [block.block_id for block in sequence.blocks]

    def list_sequences(self) -> list[int]:
        """Ids of the sequences that hold blocks, the one whose last access is longest ago first."""
        with self.lock:
            return list(self._holders)

    def note_access(self, sequence_id: int) -> None:
        """The sequence was used: it is the last that an LRU policy evicts.

        Raises:
            UnknownSequenceError: it holds nothing.
        """
        with self.lock:
            self.holdings.note_access(self.holdings.find(sequence_id))

    def get_block_info(self, block_id: int) -> BlockInfo:
        """What is known of a block, free or in use.

        Raises:
            InvalidBlockError: no such block; 0, the null block, is none.
        """
        with self.lock:
            block = self.holdings.find_block(block_id)
            block_id = block.block_id
            holders = self.holdings.list_holders(block)
            return BlockInfo(
                block_id=block_id,
                ref_count=block.ref_cnt - (block in self._pins),
                sequence_id=holders[0].sequence_id if holders else NO_SEQUENCE,
                device_id=self.device_id,
                is_pinned=block in self._pins,
                last_access_time=max((holder.last_access_time for holder in holders), default=0.0),
                sequence_ids=tuple(holder.sequence_id for holder in holders),
            )

    @property
    def block_info(self) -> BlockInfos:
        """The blocks that sequences hold: a live mapping from block id to `BlockInfo`."""
        return BlockInfos(self)

    def get_free_blocks(self) -> int:
        """How many blocks are free, the reserve included; cached ones that nobody holds count."""
        self._expire_claims()
        return self.block_pool.get_num_free_blocks()

    def count_available(self, priority: int) -> int:
        """How many blocks a request of this priority could have; below 0 where the reserve is in use."""
        if type(priority) is not int:
            check_priority(priority)
        self._expire_claims()
        num_free = self.block_pool.free_block_queue.num_free_blocks
        return num_free if priority != NORMAL else num_free - self.reserved_blocks

    def get_time(self) -> float:
        """Seconds of the pool's clock."""
        return self._clock()

    def get_fragmentation_rate(self) -> float:
        """Share of the possible runs of free blocks that is lost to scattering, 0 to 1. O(number of blocks).

        Of the runs of `run_length` that the free blocks would make in one piece, those that they do not make;
        with fewer free blocks of the largest power of two that they allow. An unfragmented pool has 0 at any
        fill. What U(k) says of any k: `block_pool.get_unusable_share(k)`.
        """
        with self.lock:
            return self.block_pool.get_fragmentation_rate(self.run_length)

    def get_statistics(self) -> PoolStatistics:
        """Counts, shares and times: what fills the pool, how scattered it is, what its calls cost.

        The pool is locked meanwhile. O(number of blocks), a few nanoseconds each.
        """
        with self.lock:
            self._expire_claims()
            known = read_statistics(self.block_pool, block_size=self.block_size, run_length=self.run_length)
            return msgspec.structs.replace(
                known,
                pinned_blocks=len(self._pins),
                reserved_blocks=self.reserved_blocks,
                moved_blocks=self._num_moved_blocks,
                num_sequences=len(self._holders),
                evicted_sequences=self._victims.num_evicted,
                looked_up_blocks=self._num_looked_up_blocks,
                hit_blocks=self._num_hit_blocks,
                allocation=self._allocation_latency.summarize(),
                freeing=self._freeing_latency.summarize(),
            )

    def get_layout(self) -> PoolLayout:
        """What each block is and where the runs of sequences lie, at one moment. O(number of blocks)."""
        with self.lock:
            return read_layout(
                self.block_pool,
                [sequence.blocks for sequence in self._holders.values()],
                block_size=self.block_size,
                run_length=self.run_length,
                device_id=self.device_id,
            )

    def describe_sequences(self) -> SequenceList:
        """Return a report of each sequence that holds blocks, the last one accessed last. O(held blocks)."""
        with self.lock:
            now = self._clock()
            fixed_ids = set(self.block_pool.holds.list_fixed_ids())
            return SequenceList(
                [
                    SequenceReport(
                        holder.sequence_id,
                        len(holder.blocks),
                        holder.priority,
                        now - holder.last_access_time,
                        holder.sequence_id in self.holdings.barred,
                        num_fixed_blocks=sum(block.block_id in fixed_ids for block in holder.blocks),
                    )
                    for holder in self._holders.values()
                ]
            )

    @property
    def retention(self) -> BlockRetention:
        """Which cached blocks are reused before or after others, by directives and sessions.

        Its request ids are `str(sequence_id)`, its token positions those of `blocks_of`. Each allocation
        handles expired timers. Calls on it are not locked: hold `lock`. The first use makes it.
        """
        with self.lock:
            return self.holdings.open_retention()

    @property
    def num_pinned_blocks(self) -> int:
        return len(self._pins)

    # ---- other ids, other devices ----------------------------------------------------------------

    def defragment(
        self, max_evictions: int = 0, max_moves: int | None = None, goal: float | None = None
    ) -> int:
        """Bring blocks in use together, the free ones too. Ids of sequences change: `on_moved`, `blocks_of`.

        Without a goal all blocks in use go to the lowest ids. With one just so many are moved as it takes, of
        the emptiest stretches of `run_length` ids, and most sequences keep the runs that they have.
        Pinned, held and watched blocks stay. Sequences, references, hashes and the order of eviction are what
        they were: by default nothing is evicted, and where the cache is full blocks in use and cached ones
        change places. To do so by threshold, or a little at each step of an engine, see `Defragmenter`.

        Args:
            max_evictions: cached blocks that may be lost where too little is empty: one copy for each instead
                of the three of an exchange.
            max_moves: stop after this many; the next call continues. Two blocks that change places are
                two moves, so that in a full cache nothing moves with 1.
            goal: the fragmentation rate to come down to, 0 to 1.
        Returns:
            How many blocks changed their id.
        Raises:
            CopyFailedError: a round of moves broke off, see `compaction.apply_moves`. Sequences have their
                bytes; of blocks that were changing places the cached ones may be evicted.
        """
        with self.lock, self._aborting:
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
            InvalidArgumentError: negative, or the storage has no room for them. Nothing has changed.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        with self.lock:
            if self.storage is not None and self.storage.num_blocks <= self.total_blocks + num_blocks:
                raise InvalidArgumentError(
                    f"the storage has blocks 0 to {self.storage.num_blocks - 1}; with {num_blocks} more the "
                    f"pool would have 1 to {self.total_blocks + num_blocks}"
                )
            with self._aborting:
                self.block_pool.grow(num_blocks)
                self._set_size(len(self.block_pool.blocks) - 1)

    def shrink(self, num_blocks: int) -> None:
        """Give up the `num_blocks` highest ids; blocks in use there move below. O(blocks of the pool).

        Cached blocks there move into what is empty below, those used last first; the others are lost. Ids of
        sequences change: see `on_moved`.

        Raises:
            InvalidArgumentError: negative, or too few blocks would be left: none, or fewer than are reserved.
            OutOfBlocksError: more are in use there than are free below.
            InvalidBlockError: one of them is pinned, held or watched. In all cases nothing has changed.
            CopyFailedError: nothing has moved; what was next to be evicted may be.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        with self.lock:
            num_left = self.total_blocks - num_blocks
            if num_blocks < 0 or num_left < max(1, self.reserved_blocks):
                raise InvalidArgumentError(
                    f"{num_blocks} of {self.total_blocks} blocks cannot be given up; "
                    f"{max(1, self.reserved_blocks)} are left at least"
                )
            with self._aborting:
                compaction.shrink(self.block_pool, num_blocks, self._copy_moves, on_moved=self._note_moved)
                self._set_size(num_left)

    def connect(self, peer: "GPUKVPool") -> None:
        """Let blocks migrate between this pool and another one of this process, both ways.

        Raises:
            InvalidArgumentError: they have the same device id, another one has it, or block sizes differ.
        """
        check_type("peer", peer, GPUKVPool)
        self._routes.connect(peer._routes)

    def attach(self, migrator: "Migrator", devices: dict[int, str]) -> None:
        """Let blocks migrate to other nodes as well: `devices` says which node is which device.

        Args:
            migrator: of this pool, over a `PoolSite` of it; it knows the nodes by their names.
        Raises:
            InvalidArgumentError: this pool, or a connected one, has such a device id. Nothing has changed.
        """
        self._routes.attach(migrator, devices)

    def get_attached_node(self, device_id: int) -> str:
        """The name of the node that was attached as this device. Raises UnknownDeviceError for none."""
        return self._routes.get_node(as_int("device_id", device_id))

    def migrate_blocks(self, block_ids: Sequence[int], target_device_id: int) -> list[int]:
        """Move blocks with their bytes to a connected pool, or node; their sequences hold them there.

        Each block goes with the sequence that has held it longest, at the end of what that has there; others
        that share it keep it here. What could be hit here can be hit there, too, if that pool caches; the old
        block keeps its hashes as long as it is not taken again.

        Returns:
            The ids there, in the same order.
        Raises:
            UnknownDeviceError: not connected.
            InvalidBlockError: a block is free, unknown or listed twice.
            PinnedBlockError: a block is pinned.
            PoolExhaustedError: too few blocks are free there; nothing is evicted for it.
            InvalidArgumentError: one of the pools has no storage, or their blocks' formats differ.
            FrozenSequenceError: another migration has one of the sequences.
            CopyFailedError: the copy broke off.
            MigrationError: the node could not take them. In all cases nothing has changed, here or there.

        To another node it takes as long as the bytes do; do not hold the pool's lock meanwhile.
        """
        target_device_id = as_int("target_device_id", target_device_id)
        return self._routes.migrate(as_ints("block_ids", block_ids), target_device_id)

    def migrate_sequence(self, sequence_id: int, target_device_id: int) -> tuple[list[int], list[int]]:
        """Move a sequence to a connected pool, or node, under the same id: all its blocks.

        Returns:
            The ids that its blocks had here and those that they have there, in the order of its tokens.
        Raises:
            As `migrate_blocks`, and UnknownSequenceError: it holds nothing; InvalidArgumentError: the target
            has a sequence of this id. Nothing has changed.

        Blocks that it shares stay with the other sequences as well.
        """
        target_device_id = as_int("target_device_id", target_device_id)
        return self._routes.migrate_sequence(as_sequence_id("sequence_id", sequence_id), target_device_id)

    def count_free_elsewhere(self) -> dict[int, int]:
        """Return how many blocks each connected pool has free, its reserve deducted, by device id."""
        return self._routes.count_free()

    def try_migrate_blocks(self, block_ids: Sequence[int], target_device_id: int) -> MigrationResult:
        """As `migrate_blocks`, with any `KVPoolError` but InvalidTypeError as a result instead of raised."""
        started = self._clock()
        try:
            migrated = self.migrate_blocks(block_ids, target_device_id)
        except InvalidTypeError:
            raise
        except KVPoolError as error:
            return MigrationResult(False, migration_time=(self._clock() - started) * 1000, error=error)
        elapsed = (self._clock() - started) * 1000
        return MigrationResult(True, migrated, elapsed, len(migrated) * self.block_bytes)

    # ---- inside, locked --------------------------------------------------------------------------

    def _abort(self, error: BaseException) -> None:
        """Complete or undo a call that raised; where that is interrupted, the next call does it."""
        self.lock = self._recovering_lock
        self._recover(error)

    def _recover(self, error: BaseException) -> None:
        """Bring the pool's books in line with its references after a call that raised.

        A refusal has changed nothing. A signal handler raises anywhere: references that are in no book yet,
        or in none any more, are given back.
        """
        if isinstance(error, KVPoolError) and not self.holdings.is_unfinished:
            self.lock = self._plain_lock
            return
        self.block_pool.rebuild_index()
        self.holdings.recover()
        self._set_size(len(self.block_pool.blocks) - 1)
        self.lock = self._plain_lock

    def _recover_late(self) -> None:
        """Complete what an interrupted call, and the interrupted `_recover` after it, have left."""
        if self.lock is self._recovering_lock:
            self._recover(InterruptedError())

    def _share(self, sequence: Holder, blocks: list[KVCacheBlock]) -> None:
        """Let a new sequence hold these blocks, with a reference more each. None: no sequence."""
        if self.lock is self._recovering_lock:  # another thread waited for the plain one
            self._recover_late()
        if not blocks:
            return
        try:
            self.block_pool.touch_onto(blocks, self.holdings.arriving)
            if self.holdings.retention is not None:
                self.holdings.retention.note_taken(blocks)
            self._hold(sequence, blocks)
            self.holdings.settle()
        except BaseException as error:
            self._abort(error)
            raise

    def _give_back(self, blocks: list[KVCacheBlock], by_holder: dict[Holder, list[KVCacheBlock]]) -> None:
        """Take blocks from sequences that hold them, all or none."""
        if self.lock is self._recovering_lock:  # another thread waited for the plain one
            self._recover_late()
        try:
            self._drop(blocks, by_holder)
        except BaseException as error:
            self._abort(error)
            raise

    def _set_size(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        if self._may_pin_all:
            self._pins.max_pinned_blocks = total_blocks

    def _allocate(self, request: BlockAllocationRequest) -> list[KVCacheBlock]:
        if self._migration_hook is None:
            with self.lock:
                return self._allocate_locked(request)
        if self.offload_threshold:
            request = as_request(request)
            self._offload_early(request, request.num_blocks)
        try:
            with self.lock:
                return self._allocate_locked(request)
        except PoolExhaustedError:
            num_missing = request.num_blocks - self.count_available(request.priority)
            if request.num_blocks > self.total_blocks:
                raise
        # Not locked: it may wait for another pool, whose hook may wait for this one.
        self._migration_hook(request, max(0, num_missing))
        with self.lock:
            return self._allocate_locked(request, ["the migration hook"])

    def _offload_early(self, request: BlockAllocationRequest, num_blocks: int) -> None:
        """Call the migration hook if `num_blocks` more in use leave fewer free than the threshold.

        The pool is not locked.
        """
        num_missing = num_blocks + self.offload_threshold - self.get_free_blocks()
        if num_missing > 0 and num_blocks <= self.total_blocks and self._migration_hook is not None:
            self._migration_hook(request, num_missing)

    def _allocate_all(
        self,
        requests: Sequence[BlockAllocationRequest],
        done: list[list[KVCacheBlock]],
        tried: Sequence[str] = (),
    ) -> list[list[int]]:
        """Take the blocks of all requests, or of none.

        Args:
            done: empty; gets the blocks of each request that was served, also where a later one is not.
        """
        self._victims.together = frozenset(request.sequence_id for request in requests)
        try:
            for request in requests:
                done.append(self._allocate_locked(request, tried))
        except BaseException:
            for request, blocks in reversed(list(zip(requests, done, strict=False))):
                if request.pinned:
                    self._pins.unpin(blocks)
                self._give_back(blocks, {self._holders[request.sequence_id]: blocks})
            raise
        finally:
            self._victims.together = _NONE
        # Now, since a later request may have moved the blocks of one before.
        return [[block.block_id for block in blocks] for blocks in done]

    def _allocate_locked(
        self, request: BlockAllocationRequest, tried: Sequence[str] = ()
    ) -> list[KVCacheBlock]:
        request = as_request(request)
        sequence_id = request.sequence_id
        if self.holdings.barred:
            self.holdings.check_usable(sequence_id)
        device_id = request.device_id
        if device_id is not None and device_id != self.device_id:
            raise UnknownDeviceError(
                f"this pool is device {self.device_id}; ask the pool of device {device_id!r}, or migrate"
            )
        if request.pinned:
            self._pins.check_room(request.num_blocks)
        if self.lock is self._recovering_lock:  # another thread waited for the plain one
            self._recover_late()
        try:
            sequence = self._holders.get(sequence_id)
            if sequence is None:
                after = None
                if self._evictions:
                    self._evictions.begin(sequence_id)
            else:
                after = next(reversed(sequence.blocks))
            taken = self.holdings.arriving
            if self.holdings.retention is not None:
                self.holdings.retention.expire()
            self._take(request, after, tried)
            if sequence is None:
                sequence = Holder(sequence_id, request.priority, self._clock())
            else:
                sequence.priority = max(sequence.priority, request.priority)
            self._hold(sequence, taken)
            if request.pinned:
                self._pins.pin(taken)
            self.holdings.settle()
        except BaseException as error:
            self._abort(error)
            raise
        return taken

    def _expire_claims(self) -> None:
        """Let pins of a retention end that are overdue: their blocks are free."""
        if self.holdings.retention is not None:
            with self.lock:
                self.holdings.retention.expire()

    def _copy_moves(self, moves: Sequence[BlockMove]) -> None:
        if self.storage is not None:
            self.storage.apply_moves(moves)

    def _note_moved(self, relocation: Relocation) -> None:
        self._num_moved_blocks += len(relocation.moves)
        if self._on_moved is not None:
            self._on_moved(relocation)


def is_run(block_ids: Sequence[int]) -> bool:
    """Are these consecutive, lowest first? One is, none are not."""
    return len(block_ids) > 0 and list(block_ids) == list(range(block_ids[0], block_ids[0] + len(block_ids)))
