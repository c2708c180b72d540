"""`GPUKVPool`: `KVPoolProtocol` over a block pool that knows its runs. Thread-safe."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NoReturn

from kv_pool.adapter.layout import PoolLayout, read_states, read_tables
from kv_pool.adapter.pins import Pins
from kv_pool.adapter.placement import Placement
from kv_pool.adapter.pressure import EvictionPolicy, LRUEviction, SequenceInfo
from kv_pool.adapter.statistics import PoolStatistics
from kv_pool.contiguous import fragmentation
from kv_pool.contiguous.compaction import Relocation
from kv_pool.contiguous.run_index import EMPTY, IN_USE
from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH, RunBlockPool
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.errors import (
    InvalidArgumentError,
    InvalidBlockError,
    InvalidTypeError,
    KVPoolError,
    PinnedBlockError,
    PoolExhaustedError,
    UnknownDeviceError,
    UnknownSequenceError,
)
from kv_pool.ids import BlockHash, BlockHashWithGroupId, BlockMove
from kv_pool.metrics.latency import TIMED_EVERY, LatencyWindow
from kv_pool.protocol import (
    NO_SEQUENCE,
    NORMAL,
    URGENT,
    AllocationResult,
    BlockAllocationRequest,
    BlockInfo,
    Contiguity,
    KVPoolProtocol,
    MigrationResult,
)

if TYPE_CHECKING:
    from os import PathLike

    from kv_pool.events.resident_state import ResidentState
    from kv_pool.storage.block_layout import BlockLayout
    from kv_pool.storage.block_storage import BlockStorage
    from kv_pool.tiers.dump.dump_reader import PoolDumpHeader
    from kv_pool.tiers.pool_dump import LoadedPool


class _Sequence:
    """Who holds blocks: in the order of its tokens, each once."""

    __slots__ = ("blocks", "last_access_time", "priority", "sequence_id")

    def __init__(self, sequence_id: int, priority: int, now: float) -> None:
        self.sequence_id = sequence_id
        self.priority = priority
        self.last_access_time = now
        self.blocks: dict[KVCacheBlock, None] = {}


@dataclass(frozen=True, slots=True)
class _Prefix:
    """What a pool reads of a request, where hashes are all that is known of it."""

    block_hashes: Sequence[BlockHash] = ()
    all_token_ids: Sequence[int] = field(default_factory=list)
    lora_request: Any = None
    mm_features: None = None
    cache_salt: None = None
    session_id: None = None


class GPUKVPool(KVPoolProtocol):
    """The blocks of one device, handed out to sequences by id.

        >>> from kv_pool import BlockAllocationRequest, GPUKVPool
        >>> pool = GPUKVPool(total_blocks=100, block_size=16)
        >>> pool.allocate(BlockAllocationRequest(num_blocks=3, sequence_id=1))
        [1, 2, 3]
        >>> pool.allocate(BlockAllocationRequest(num_blocks=1, sequence_id=1)), pool.blocks_of(1)
        ([4], [1, 2, 3, 4])
        >>> pool.fork(1, 2)
        [1, 2, 3, 4]
        >>> pool.free_sequence(1), pool.get_free_blocks(), pool.get_block_info(4).sequence_id
        (0, 96, 2)

    Block ids run from 1 to `total_blocks`; 0 is the null block, so a storage has one block more.

    Args:
        block_size: tokens per block.
        device_id: of this pool; distinct among pools that are connected.
        storage: the bytes of the blocks. Without one, whoever holds them copies in `on_moved`, or there are
            none, and nothing can be migrated.
        block_bytes: for `AllocationResult`, where there is no storage.
        reserved_blocks: free blocks that requests of priority 0 leave alone.
        max_pinned_blocks: how many blocks may be pinned at once; None for all, however many they become.
        eviction_policy: which sequences lose their blocks to a request that finds too few; None for none.
        on_evicted: called with a sequence's id and its block ids before it loses them, while the pool is
            locked: take note, do not wait for another thread.
        on_moved: called with a `Relocation` when ids have changed, before any old id can be taken; locked,
            too. Without it ids change in `defragment` only.
        migration_hook: called with the request that is about to be refused, and how many blocks it lacks (in
            `allocate_many`, how many the batch lacks); the pool is not locked. It may free or migrate blocks;
            then the request, or the batch, is tried once more.
        run_length: what `get_fragmentation_rate` is about.
        enable_caching: freed blocks keep their hashes until they are taken.
        enable_kv_cache_events: note which blocks become cached and which are evicted, for `take_events`.
        clock: seconds, for `last_access_time` and the times in results.

    Attributes:
        block_pool: the pool underneath, for its prefix cache and its invariants. Blocks that are taken there
            are nobody's here, and never move. Calls on it are not locked.

    Priorities: 1 and 2 may use the reserve, no request evicts a sequence of higher priority, and what a
    sequence of higher priority gave back is kept in the cache longer.
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
        eviction_policy: EvictionPolicy | None = None,
        on_evicted: Callable[[int, list[int]], object] | None = None,
        on_moved: Callable[[Relocation], object] | None = None,
        migration_hook: Callable[[BlockAllocationRequest, int], object] | None = None,
        run_length: int = DEFAULT_RUN_LENGTH,
        enable_caching: bool = True,
        enable_kv_cache_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(total_blocks, int) or total_blocks < 1:
            raise InvalidArgumentError(f"total_blocks is {total_blocks!r}; a pool hands out at least 1 block")
        if not 0 <= reserved_blocks <= total_blocks:
            raise InvalidArgumentError(f"{reserved_blocks} of {total_blocks} blocks cannot be reserved")
        if storage is not None and storage.num_blocks <= total_blocks:
            raise InvalidArgumentError(
                f"the storage has blocks 0 to {storage.num_blocks - 1}, the pool 1 to {total_blocks}"
            )
        self.total_blocks = total_blocks
        self.block_size = block_size
        self.device_id = device_id
        self.block_bytes = block_bytes if storage is None else storage.block_bytes
        self.reserved_blocks = reserved_blocks
        self.run_length = run_length
        self.block_pool = RunBlockPool(
            total_blocks + 1, enable_caching, block_size, enable_kv_cache_events=enable_kv_cache_events
        )
        self._storage = storage
        self._eviction_policy = eviction_policy
        self._on_evicted = on_evicted
        self._migration_hook = migration_hook
        self._clock = clock
        # Reentrant, so that callbacks may look.
        self._lock = threading.RLock()
        # In the order of last access, longest ago first.
        self._sequences: dict[int, _Sequence] = {}
        # Keyed by block objects, which keep their identity when ids are exchanged.
        self._holders: dict[KVCacheBlock, _Sequence] = {}
        self._later_holders: dict[KVCacheBlock, list[_Sequence]] = {}
        self._pins = Pins(total_blocks if max_pinned_blocks is None else max_pinned_blocks)
        self._may_pin_all = max_pinned_blocks is None
        self._placement = Placement(self.block_pool, self._copy_moves, on_moved)
        self._retention = self._placement.retention
        self._peers: dict[int, GPUKVPool] = {}
        self._allocation_latency = LatencyWindow()
        self._freeing_latency = LatencyWindow()
        # Bound here, and written out where they are called: a short call feels each step in between.
        self._number_allocation = self._allocation_latency.number_call
        self._number_freeing = self._freeing_latency.number_call
        self._num_moved_blocks = 0
        self._num_evicted_sequences = 0
        self._num_looked_up_blocks = 0
        self._num_hit_blocks = 0
        self._together: frozenset[int] = frozenset()  # the sequences of the batch that is being served

    # ---- taking ----------------------------------------------------------------------------------

    def allocate(self, request: BlockAllocationRequest) -> list[int]:
        """Take blocks for a sequence, after those that it has.

        What comes next in the ids of a sequence that grows is tried first; then a run, of those that there
        are the one whose content is oldest; then, within `max_moves`, one that is made by moving other
        blocks, if somebody hears of it (`on_moved`). Too few blocks: sequences are evicted by policy. Then
        the request is refused, or left to the migration hook.

        Returns:
            `num_blocks` ids in the order of the sequence, held by nobody else.
        Raises:
            PoolExhaustedError: too few blocks, or no run where one is required; a `MemoryError`, too. It
                says what was tried. Nothing has changed.
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
        for request in requests:
            check_request(request)
        done: list[list[KVCacheBlock]] = []
        try:
            with self._lock:
                return self._allocate_all(requests, done)
        except PoolExhaustedError:
            num_blocks = sum(request.num_blocks for request in requests)
            if self._migration_hook is None or num_blocks > self.total_blocks:
                raise
            refused = requests[len(done)]
            num_missing = num_blocks - self._count_available(refused.priority)
        self._migration_hook(refused, max(0, num_missing))
        with self._lock:
            return self._allocate_all(requests, [], ["the migration hook"])

    def fork(self, parent_id: int, child_id: int, num_blocks: int | None = None) -> list[int]:
        """Let a new sequence share the first `num_blocks` blocks of another one; None for all.

        Returns:
            Their ids. Whoever writes into a block with `ref_count` above 1 takes one of its own before.
        Raises:
            UnknownSequenceError: the parent holds nothing.
            InvalidArgumentError: the child holds blocks already, or the parent not so many. In both cases
                nothing has changed.
        """
        with self._lock:
            parent = self._find_sequence(parent_id)
            check_sequence_id(child_id)
            if child_id in self._sequences:
                raise InvalidArgumentError(
                    f"sequence {child_id} holds blocks already; fork() makes a new one"
                )
            count = len(parent.blocks) if num_blocks is None else num_blocks
            if not 0 <= count <= len(parent.blocks):
                raise InvalidArgumentError(
                    f"sequence {parent_id} has {len(parent.blocks)} blocks; {count} of them cannot be shared"
                )
            shared = list(parent.blocks)[:count]
            self.block_pool.touch(shared)
            if shared:
                self._hold(_Sequence(child_id, parent.priority, self._clock()), shared)
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
        with self._lock:
            blocks = list(self._find_sequence(sequence_id).blocks)
            if len(block_hashes) > len(blocks):
                raise InvalidArgumentError(
                    f"{len(block_hashes)} hashes for the {len(blocks)} blocks of sequence {sequence_id}"
                )
            num_tokens = len(block_hashes) * self.block_size
            if token_ids is not None and len(token_ids) < num_tokens:
                raise InvalidArgumentError(
                    f"{len(token_ids)} token ids for {len(block_hashes)} blocks of {self.block_size} tokens"
                )
            num_cached = 0
            while num_cached < len(block_hashes) and blocks[num_cached].block_hash is not None:
                num_cached += 1
            # A block may be cached behind one that is not: one that migrated here, say.
            is_bare = [block.block_hash is None for block in blocks[num_cached : len(block_hashes)]]
            self.block_pool.cache_full_blocks(
                _Prefix(block_hashes, token_ids or []),
                blocks,
                num_cached,
                len(block_hashes),
                self.block_size,
                0,
                is_bare,
            )

    def take_events(self) -> list[KVCacheEvent]:
        """What became cached and what was evicted since the last call, oldest first; theirs who call.

        Always [] without `enable_kv_cache_events`. With it, events pile up until they are taken.
        """
        with self._lock:
            return self.block_pool.take_events()

    def claim_prefix(
        self, sequence_id: int, block_hashes: Sequence[BlockHash], priority: int = NORMAL
    ) -> list[int]:
        """Let a new sequence begin with the longest prefix that is cached.

        Returns:
            The ids of its blocks, head first; [] for a miss, and then there is no such sequence yet.
        Raises:
            InvalidArgumentError: it holds blocks already, or there is no such priority.
        """
        with self._lock:
            if sequence_id in self._sequences:
                raise InvalidArgumentError(f"sequence {sequence_id} holds blocks; a prefix comes first")
            check_sequence_id(sequence_id)
            check_priority(priority)
            hits = self.block_pool.find_cached_prefix(block_hashes, len(block_hashes))
            self._num_looked_up_blocks += len(block_hashes)
            self._num_hit_blocks += len(hits)
            if hits:
                self.block_pool.touch(hits)
                self._retention.note_taken(hits)
                self._hold(_Sequence(sequence_id, priority, self._clock()), hits)
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

        with self._lock:
            return dump_pool(
                path, self.block_pool, storage=self._storage, layout=layout, stream_state=stream_state
            )

    def load(self, path: "str | PathLike[str]", *, layout: "BlockLayout | None" = None) -> "LoadedPool":
        """Have cached what a file of `dump` says, before the first sequence. See `tiers.pool_dump`."""
        from kv_pool.tiers.pool_dump import load_pool

        with self._lock:
            return load_pool(path, self.block_pool, storage=self._storage, layout=layout)

    # ---- giving back -----------------------------------------------------------------------------

    def free(self, block_ids: Sequence[int], sequence_id: int | None = None) -> None:
        """Take each block from the sequence that has held it longest, or from the one that is named.

        What nobody holds any more is free, and can be hit as long as it is not taken again.
        Raises:
            InvalidBlockError: no such block, a free one, one listed twice, or not held by that sequence.
            PinnedBlockError: a pinned block would become free. In both cases nothing has changed.
        Cost: O(len(block_ids)).
        """
        started_ns = 0 if self._number_freeing() % TIMED_EVERY else perf_counter_ns()
        try:
            with self._lock:
                self._drop(self._find_holders(block_ids, sequence_id))
        finally:
            if started_ns:
                self._freeing_latency.note(perf_counter_ns() - started_ns)

    def free_many(self, batches: Sequence[Sequence[int]]) -> None:
        """As `free` of all blocks of all batches, all or none; none is listed twice."""
        self.free([block_id for batch in batches for block_id in batch])

    def free_sequence(self, sequence_id: int) -> int:
        """Take all its blocks from a sequence.

        Returns:
            How many became free; the others are held by other sequences as well.
        Raises:
            UnknownSequenceError: it holds nothing: freed twice, or evicted.
            PinnedBlockError: a pinned block would become free. In both cases nothing has changed.
        """
        started_ns = 0 if self._number_freeing() % TIMED_EVERY else perf_counter_ns()
        try:
            with self._lock:
                sequence = self._find_sequence(sequence_id)
                num_free = self.block_pool.get_num_free_blocks()
                self._drop([(sequence, block) for block in sequence.blocks])
                return self.block_pool.get_num_free_blocks() - num_free
        finally:
            if started_ns:
                self._freeing_latency.note(perf_counter_ns() - started_ns)

    def evict(self, num_blocks: int) -> list[int]:
        """Take their blocks from as few sequences as free `num_blocks` more, in the order of the policy.

        The LRU policy where the pool has none. Returns the sequences' ids; [] with nothing changed where all
        that may go would not suffice.
        """
        with self._lock:
            victims = self._choose_victims(URGENT, None, num_blocks)
            return self._evict(victims or [])

    # ---- pinning ---------------------------------------------------------------------------------

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep blocks in use where they are: not evicted, moved or migrated, until unpinned as often.

        Raises:
            InvalidBlockError: no such block, or nobody's.
            PinLimitError: too many would be pinned. In both cases nothing has changed.
        """
        with self._lock:
            self._pins.pin(self._find_held(block_ids))

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Take one pin off each block.

        Raises:
            InvalidBlockError: no such block, or not pinned so often. Nothing has changed.
        """
        with self._lock:
            self._pins.unpin(self._find_held(block_ids))

    # ---- looking ---------------------------------------------------------------------------------

    def blocks_of(self, sequence_id: int) -> list[int]:
        """Block ids of a sequence in the order of its tokens; [] if it holds none."""
        with self._lock:
            sequence = self._sequences.get(sequence_id)
            return [] if sequence is None else [block.block_id for block in sequence.blocks]

    def list_sequences(self) -> list[int]:
        """Ids of the sequences that hold blocks, the one whose last access is longest ago first."""
        with self._lock:
            return list(self._sequences)

    def note_access(self, sequence_id: int) -> None:
        """The sequence was used: it is the last that an LRU policy evicts.

        Raises:
            UnknownSequenceError: it holds nothing.
        """
        with self._lock:
            self._note_access(self._find_sequence(sequence_id))

    def get_block_info(self, block_id: int) -> BlockInfo:
        """What is known of a block, free or in use.

        Raises:
            InvalidBlockError: no such block; 0, the null block, is none.
        """
        with self._lock:
            block = self._find_block(block_id)
            holder = self._holders.get(block)
            return BlockInfo(
                block_id=block_id,
                ref_count=block.ref_cnt,
                sequence_id=NO_SEQUENCE if holder is None else holder.sequence_id,
                device_id=self.device_id,
                is_pinned=block in self._pins,
                last_access_time=0.0 if holder is None else holder.last_access_time,
            )

    def get_free_blocks(self) -> int:
        """How many blocks are free, the reserve included; cached ones that nobody holds count."""
        return self.block_pool.get_num_free_blocks()

    def get_fragmentation_rate(self) -> float:
        """Share of the free blocks that cannot serve a run of `run_length`, 0 to 1. O(number of blocks)."""
        with self._lock:
            return self.block_pool.get_fragmentation_rate(self.run_length)

    def get_statistics(self) -> PoolStatistics:
        """Counts, shares and times: what fills the pool, how scattered it is, what its calls cost.

        The pool is locked meanwhile. O(number of blocks), a few nanoseconds each.
        """
        with self._lock:
            free_blocks = self.block_pool.get_num_free_blocks()
            used_blocks = self.total_blocks - free_blocks
            ages = self.block_pool.run_index.ages
            run_lengths = self.block_pool.list_free_runs()
            return PoolStatistics(
                total_blocks=self.total_blocks,
                used_blocks=used_blocks,
                free_blocks=free_blocks,
                cached_free_blocks=len(ages) - ages.count(IN_USE) - ages.count(EMPTY),
                pinned_blocks=len(self._pins),
                reserved_blocks=self.reserved_blocks,
                num_sequences=len(self._sequences),
                block_size=self.block_size,
                utilization=used_blocks / self.total_blocks,
                fragmentation_rate=fragmentation.get_unusable_share(run_lengths, self.run_length),
                run_length=self.run_length,
                largest_free_run=max(run_lengths, default=0),
                largest_run_loss=fragmentation.get_largest_run_loss(run_lengths),
                epoch=self.block_pool.epoch,
                moved_blocks=self._num_moved_blocks,
                evicted_sequences=self._num_evicted_sequences,
                evicted_blocks=self.block_pool.num_evictions,
                looked_up_blocks=self._num_looked_up_blocks,
                hit_blocks=self._num_hit_blocks,
                allocation=self._allocation_latency.summarize(),
                freeing=self._freeing_latency.summarize(),
            )

    def get_layout(self) -> PoolLayout:
        """What each block is and where the runs of sequences lie, at one moment. O(number of blocks)."""
        with self._lock:
            states = read_states(self.block_pool, self._pins.list_ids())
            tables = [sequence.blocks for sequence in self._sequences.values()]
            joins, holders = read_tables(len(states), tables)
            epoch = self.block_pool.epoch
        return PoolLayout(self.block_size, self.run_length, epoch, self.device_id, states, joins, holders)

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
        Pinned blocks stay, and so does what is in flight: taken from `block_pool` by somebody else, or waited
        for there until it is reused. Sequences, references, hashes and the order of eviction are what they
        were. To do so by threshold, or a little at each step of an engine, see `Defragmenter`.

        Args:
            max_evictions: cached blocks that may be lost where too little is empty; with none and a full
                cache nothing moves.
            max_moves: stop after so many; the next call goes on from there.
            goal: the fragmentation rate to come down to, 0 to 1.
        Returns:
            How many blocks changed their id.
        Raises:
            CopyFailedError: a round of moves broke off. Its blocks have not moved; earlier ones' have.
        """
        with self._lock:
            fixed = self._list_fixed()
            if goal is None:
                return self._placement.pack(fixed, max_moves, max_evictions)
            return self._placement.gather(fixed, max_moves, max_evictions, self.run_length, goal)

    def grow(self, num_blocks: int) -> None:
        """Add `num_blocks` free, empty blocks with the highest ids. O(blocks of the pool).

        Raises:
            InvalidArgumentError: negative, or the storage has no room for them. Nothing has changed.
        """
        with self._lock:
            if self._storage is not None and self._storage.num_blocks <= self.total_blocks + num_blocks:
                raise InvalidArgumentError(
                    f"the storage has blocks 0 to {self._storage.num_blocks - 1}; with {num_blocks} more the "
                    f"pool would have 1 to {self.total_blocks + num_blocks}"
                )
            self.block_pool.grow(num_blocks)
            self._set_size(self.total_blocks + num_blocks)

    def shrink(self, num_blocks: int) -> None:
        """Give up the `num_blocks` highest ids; blocks in use there move below. O(blocks of the pool).

        Cached blocks there move into what is empty below, those used last first; the others are lost. Ids of
        sequences change: see `on_moved`.

        Raises:
            InvalidArgumentError: negative, or too few blocks would be left: none, or fewer than are reserved.
            OutOfBlocksError: more are in use there than are free below.
            InvalidBlockError: one of them is pinned, or in flight. In all cases nothing has changed.
            CopyFailedError: nothing has moved; what was next to be evicted may be.
        """
        with self._lock:
            num_left = self.total_blocks - num_blocks
            if num_blocks < 0 or num_left < max(1, self.reserved_blocks):
                raise InvalidArgumentError(
                    f"{num_blocks} of {self.total_blocks} blocks cannot be given up; "
                    f"{max(1, self.reserved_blocks)} are left at least"
                )
            self._placement.shrink(num_blocks, self._list_fixed())
            self._set_size(num_left)

    def connect(self, peer: "GPUKVPool") -> None:
        """Let blocks migrate between this pool and another one of this process, both ways.

        Raises:
            InvalidArgumentError: they have the same device id, another one has it, or block sizes differ.
        """
        for pool, other in ((self, peer), (peer, self)):
            known = pool._peers.get(other.device_id, other)
            if other.device_id == pool.device_id or known is not other:
                raise InvalidArgumentError(f"device {other.device_id} is known here already")
        if peer.block_size != self.block_size:
            raise InvalidArgumentError(f"blocks of {self.block_size} tokens here, {peer.block_size} there")
        self._peers[peer.device_id] = peer
        peer._peers[self.device_id] = self

    def migrate_blocks(self, block_ids: Sequence[int], target_device_id: int) -> list[int]:
        """Move blocks with their bytes to a connected pool; their sequences hold them there.

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
            CopyFailedError: the copy broke off. In all cases nothing has changed, here or there.
        """
        target = self._peers.get(target_device_id)
        if target is None:
            raise UnknownDeviceError(
                f"device {target_device_id!r} is not connected to device {self.device_id}; "
                f"connected are {sorted(self._peers)}. See connect()."
            )
        if self._storage is None or target._storage is None:
            raise InvalidArgumentError("blocks migrate between pools that have a storage; one has none")
        with ExitStack() as locks:
            for pool in sorted((self, target), key=lambda pool: pool.device_id):  # always in this order
                locks.enter_context(pool._lock)
            drops = self._find_holders(block_ids, None)
            blocks = [block for _, block in drops]
            if self._pins.is_any_pinned(blocks):
                pinned = next(block for block in blocks if block in self._pins)
                raise PinnedBlockError(
                    f"block {pinned.block_id} is pinned and does not migrate; unpin it first"
                )
            num_blocks = len(blocks)
            lowest = min((sequence.priority for sequence, _ in drops), default=URGENT)
            if num_blocks > target._count_available(lowest):
                raise PoolExhaustedError(
                    f"{num_blocks} blocks cannot migrate from device {self.device_id} to {target_device_id}: "
                    f"{target._count_available(lowest)} are free there"
                )
            if not blocks:
                return []
            taken = target._placement.take_run(num_blocks, None, "prefer")
            if taken is None:
                taken = target._placement.take_any(num_blocks, None)
            moves = [
                BlockMove(block.block_id, new.block_id) for block, new in zip(blocks, taken, strict=True)
            ]
            try:
                self._storage.copy_to(target._storage, moves)
                # The old ids may be taken on return, by work that is queued elsewhere.
                target._storage.synchronize()
            except BaseException:
                target.block_pool.free_blocks(taken)
                raise
            for (sequence, _), new in zip(drops, taken, strict=True):
                there = target._sequences.get(sequence.sequence_id)
                if there is None:
                    there = _Sequence(sequence.sequence_id, sequence.priority, target._clock())
                target._hold(there, [new])
            if target.block_pool.enable_caching:
                parents = find_parents(drops)
                for block, new in zip(blocks, taken, strict=True):
                    if block.block_hash is not None:
                        others = self.block_pool.cached_block_hashes_by_block.get(block.block_id, ())
                        target._learn_keys(new, [block.block_hash, *others], block, parents[block])
            self._drop(drops)
            return [block.block_id for block in taken]

    def try_migrate_blocks(self, block_ids: Sequence[int], target_device_id: int) -> MigrationResult:
        """As `migrate_blocks`, with whatever it raises of ours as a result."""
        started = self._clock()
        try:
            migrated = self.migrate_blocks(block_ids, target_device_id)
        except KVPoolError as error:
            return MigrationResult(False, migration_time=(self._clock() - started) * 1000, error=error)
        elapsed = (self._clock() - started) * 1000
        return MigrationResult(True, migrated, elapsed, len(migrated) * self.block_bytes)

    # ---- inside, locked --------------------------------------------------------------------------

    def _set_size(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        if self._may_pin_all:
            self._pins.max_pinned_blocks = total_blocks

    def _allocate(self, request: BlockAllocationRequest) -> list[KVCacheBlock]:
        if self._migration_hook is None:
            with self._lock:
                return self._allocate_locked(request)
        try:
            with self._lock:
                return self._allocate_locked(request)
        except PoolExhaustedError:
            num_missing = request.num_blocks - self._count_available(request.priority)
            if request.num_blocks > self.total_blocks:
                raise
        # Not locked: it may wait for another pool, whose hook may wait for this one.
        self._migration_hook(request, max(0, num_missing))
        with self._lock:
            return self._allocate_locked(request, ["the migration hook"])

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
        self._together = frozenset(request.sequence_id for request in requests)
        try:
            for request in requests:
                done.append(self._allocate_locked(request, tried))
        except BaseException:
            for request, blocks in reversed(list(zip(requests, done, strict=False))):
                if request.pinned:
                    self._pins.unpin(blocks)
                self._drop([(self._sequences[request.sequence_id], block) for block in blocks])
            raise
        finally:
            self._together = frozenset()
        # Now, since a later request may have moved the blocks of one before.
        return [[block.block_id for block in blocks] for blocks in done]

    def _allocate_locked(
        self, request: BlockAllocationRequest, tried: Sequence[str] = ()
    ) -> list[KVCacheBlock]:
        num_blocks = request.num_blocks
        if type(num_blocks) is not int or num_blocks < 1 or request.priority not in (0, 1, 2):
            check_request(request)
        check_sequence_id(request.sequence_id)
        device_id = request.device_id
        if device_id is not None and device_id != self.device_id:
            raise UnknownDeviceError(
                f"this pool is device {self.device_id}; ask the pool of device {device_id!r}, or migrate"
            )
        if request.pinned:
            self._pins.check_room(num_blocks)
        sequence = self._sequences.get(request.sequence_id)
        after = None if sequence is None else next(reversed(sequence.blocks))
        taken = self._take(request, after, tried)
        if sequence is None:
            sequence = _Sequence(request.sequence_id, request.priority, self._clock())
        else:
            sequence.priority = max(sequence.priority, request.priority)
        self._hold(sequence, taken)
        if request.pinned:
            self._pins.pin(taken)
        return taken

    def _take(
        self, request: BlockAllocationRequest, after: KVCacheBlock | None, tried: Sequence[str]
    ) -> list[KVCacheBlock]:
        """Take the blocks of a request, after making room for them."""
        num_blocks = request.num_blocks
        contiguous = request.contiguous
        placement = self._placement
        attempts = list(tried)
        if contiguous == "require" and num_blocks > 1:
            return self._take_required(request, after, attempts)
        if num_blocks > self._count_available(request.priority):
            self._make_room(request, attempts)
        if num_blocks == 1 or contiguous == "no":
            return placement.take_any(num_blocks, after)
        if contiguous != "prefer":
            raise InvalidArgumentError(f"contiguous is {contiguous!r}; it is require, prefer or no")
        taken = placement.take_run(num_blocks, after, contiguous)
        if taken is None and placement.may_move:
            max_moves = num_blocks if request.max_moves is None else request.max_moves
            taken = placement.make_run(num_blocks, max_moves, self._list_fixed(), "prefer")
        return placement.take_any(num_blocks, after) if taken is None else taken

    def _take_required(
        self, request: BlockAllocationRequest, after: KVCacheBlock | None, attempts: list[str]
    ) -> list[KVCacheBlock]:
        """Take a run: one that is there, one that is made, one that is left when sequences have gone."""
        num_blocks = request.num_blocks
        placement = self._placement
        is_enough = num_blocks <= self._count_available(request.priority)
        if (
            not is_enough
            and request.max_moves is None
            and placement.may_clear(num_blocks, self._list_fixed())
        ):
            # Enough blocks are all it takes: the rest moves out of the way.
            self._make_room(request, attempts)
            is_enough = True
        if is_enough:
            taken = self._take_run(request, after)
            if taken is not None:
                return taken
            attempts.append("compaction" if placement.may_move else "no compaction (nobody hears of moves)")
        self._evict_for_run(request, attempts)
        taken = placement.take_run(num_blocks, after, "require")
        if taken is None:  # one search does not look at all of a large pool
            self._refuse(request, attempts)
        return taken

    def _take_run(
        self, request: BlockAllocationRequest, after: KVCacheBlock | None
    ) -> list[KVCacheBlock] | None:
        """Take a run that is there, or make one; at the cost of cached blocks of high priority only then."""
        num_blocks = request.num_blocks
        placement = self._placement
        modes: tuple[Contiguity, ...] = ("prefer", "require") if placement.retention else ("require",)
        for mode in modes:
            taken = placement.take_run(num_blocks, after, mode)
            if taken is None:
                taken = placement.make_run(num_blocks, request.max_moves, self._list_fixed(), mode)
            if taken is not None:
                return taken
        return None

    def _make_room(self, request: BlockAllocationRequest, attempts: list[str]) -> None:
        """Evict sequences until the request's blocks are there, or refuse it with nothing changed."""
        num_missing = request.num_blocks - self._count_available(request.priority)
        if request.num_blocks <= self.total_blocks and self._eviction_policy is not None:
            victims = self._choose_victims(request.priority, request.sequence_id, num_missing)
            if victims is not None:
                self._evict(victims)
                return
            attempts.append("eviction (too little may go)")
        self._refuse(request, attempts)

    def _evict_for_run(self, request: BlockAllocationRequest, attempts: list[str]) -> None:
        """Evict the fewest sequences, in the policy's order, that leave a run; or refuse."""
        if self._eviction_policy is not None and request.num_blocks <= self.total_blocks:
            victims: list[_Sequence] = []
            freed: list[int] = []
            num_available = self._count_available(request.priority)
            left: dict[KVCacheBlock, int] = {}
            for sequence in self._rank(request.priority, request.sequence_id):
                victims.append(sequence)
                freed += [block.block_id for block in count_freed(sequence, left)]
                is_enough = request.num_blocks <= num_available + len(freed)
                if is_enough and self._placement.has_run(request.num_blocks, freed):
                    self._evict(victims)
                    return
            attempts.append("eviction (no run even without all that may go)")
        self._refuse(request, attempts)

    def _refuse(self, request: BlockAllocationRequest, attempts: Sequence[str]) -> NoReturn:
        num_free = self.get_free_blocks()
        kept = f", {self.reserved_blocks} of them reserved" if request.priority == NORMAL else ""
        run = "a run of " if request.contiguous == "require" else ""
        raise PoolExhaustedError(
            f"asked for {run}{request.num_blocks} blocks for sequence {request.sequence_id}, {num_free} are "
            f"free of {self.total_blocks}{kept if self.reserved_blocks else ''}. Tried: "
            f"{', '.join(attempts) or 'nothing else'}. Free or evict a sequence, or ask for fewer."
        )

    def _count_available(self, priority: int) -> int:
        num_free = self.block_pool.free_block_queue.num_free_blocks
        return num_free if priority != NORMAL else num_free - self.reserved_blocks

    def _rank(self, priority: int, sequence_id: int | None) -> list[_Sequence]:
        """Sequences that may be evicted for this one's sake, in the policy's order."""
        candidates = [
            SequenceInfo(
                sequence.sequence_id, len(sequence.blocks), sequence.priority, sequence.last_access_time
            )
            for sequence in self._sequences.values()
            if sequence.priority <= priority
            and sequence.sequence_id != sequence_id
            and sequence.sequence_id not in self._together
            and not self._pins.is_any_pinned(sequence.blocks)
        ]
        allowed = {candidate.sequence_id for candidate in candidates}
        policy = self._eviction_policy or LRUEviction()
        ranked = dict.fromkeys(policy.rank(candidates))
        return [self._sequences[victim] for victim in ranked if victim in allowed]

    def _choose_victims(
        self, priority: int, sequence_id: int | None, num_blocks: int
    ) -> list[_Sequence] | None:
        """The first in the policy's order that free so many blocks together; None if all do not."""
        victims: list[_Sequence] = []
        left: dict[KVCacheBlock, int] = {}
        num_freed = 0
        if num_blocks <= 0:
            return victims
        for sequence in self._rank(priority, sequence_id):
            victims.append(sequence)
            num_freed += len(count_freed(sequence, left))
            if num_freed >= num_blocks:
                return victims
        return None

    def _evict(self, victims: Sequence[_Sequence]) -> list[int]:
        for sequence in victims:
            if self._on_evicted is not None:
                self._on_evicted(sequence.sequence_id, [block.block_id for block in sequence.blocks])
            self._drop([(sequence, block) for block in sequence.blocks])
            self._num_evicted_sequences += 1
        return [sequence.sequence_id for sequence in victims]

    def _hold(self, sequence: _Sequence, blocks: list[KVCacheBlock]) -> None:
        """Enter the sequence as a holder of blocks, whose references are counted already."""
        added = dict.fromkeys(blocks, sequence)
        if self._later_holders or not self._holders.keys().isdisjoint(added):
            for block in blocks:
                if block in self._holders:
                    self._later_holders.setdefault(block, []).append(sequence)
                    del added[block]
        self._holders.update(added)
        sequence.blocks.update(dict.fromkeys(blocks))
        self._note_access(sequence)

    def _note_access(self, sequence: _Sequence) -> None:
        self._sequences.pop(sequence.sequence_id, None)
        self._sequences[sequence.sequence_id] = sequence
        sequence.last_access_time = self._clock()

    def _drop(self, drops: Sequence[tuple[_Sequence, KVCacheBlock]]) -> None:
        """Take blocks from sequences that hold them. Raises PinnedBlockError; nothing has changed then."""
        if self._pins:
            for _, block in drops:
                if block in self._pins and block.ref_cnt == 1:
                    raise PinnedBlockError(
                        f"block {block.block_id} is pinned and nobody else holds it; unpin it first"
                    )
        blocks = [block for _, block in drops]
        # Tail first, so that the head of a prefix can be hit longest; blocks without hash have no such order.
        blocks.reverse()
        self.block_pool.free_blocks(blocks)
        holders = self._holders
        for sequence, block in drops:
            del sequence.blocks[block]
            if not sequence.blocks:
                del self._sequences[sequence.sequence_id]
            if block in self._later_holders:
                self._drop_shared(sequence, block)
            else:
                del holders[block]
            if block.block_hash is not None:
                self._retention.note_freed([block], sequence.priority)

    def _drop_shared(self, sequence: _Sequence, block: KVCacheBlock) -> None:
        later = self._later_holders[block]
        if self._holders[block] is sequence:
            self._holders[block] = later.pop(0)
        else:
            later.remove(sequence)
        if not later:
            del self._later_holders[block]

    def _find_sequence(self, sequence_id: int) -> _Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise UnknownSequenceError(
                f"sequence {sequence_id!r} holds no blocks on device {self.device_id}. Freed twice? Evicted?"
            )
        return sequence

    def _find_block(self, block_id: int) -> KVCacheBlock:
        if not isinstance(block_id, int):
            raise InvalidTypeError(f"a block id is an int, not a {type(block_id).__name__}")
        if not 0 < block_id <= self.total_blocks:
            raise InvalidBlockError(f"block {block_id} is not one of 1 to {self.total_blocks}")
        return self.block_pool.blocks[block_id]

    def _find_held(self, block_ids: Sequence[int]) -> list[KVCacheBlock]:
        """The blocks, each of which some sequence holds."""
        blocks = self.block_pool.blocks
        holders = self._holders
        found = []
        for block_id in block_ids:
            if type(block_id) is not int or not 0 < block_id <= self.total_blocks:
                self._find_block(block_id)
            block = blocks[block_id]
            if block not in holders:
                raise InvalidBlockError(f"block {block_id} is held by no sequence. Was it freed twice?")
            found.append(block)
        return found

    def _find_holders(
        self, block_ids: Sequence[int], sequence_id: int | None
    ) -> list[tuple[_Sequence, KVCacheBlock]]:
        """Who loses which block, each listed once."""
        blocks = self._find_held(block_ids)
        if len(set(block_ids)) != len(block_ids):
            twice = next(block_id for at, block_id in enumerate(block_ids) if block_id in block_ids[:at])
            raise InvalidBlockError(f"block {twice} is listed twice")
        if sequence_id is None:
            return [(self._holders[block], block) for block in blocks]
        sequence = self._find_sequence(sequence_id)
        for block in blocks:
            if block not in sequence.blocks:
                raise InvalidBlockError(f"block {block.block_id} is not held by sequence {sequence_id}")
        return [(sequence, block) for block in blocks]

    def _learn_keys(
        self,
        block: KVCacheBlock,
        keys: Sequence[BlockHashWithGroupId],
        original: KVCacheBlock,
        parent: BlockHash | None,
    ) -> None:
        """Let a block be hit by what its original in another pool is hit by, and tell of it.

        Args:
            parent: what the block before is hit by; None for none, or where that is not known.
        """
        pool = self.block_pool
        num_tokens = original.block_hash_num_tokens
        start = max(0, (num_tokens or 0) - self.block_size)
        for key in keys:
            pool._insert_block_hash(key, block, num_tokens)
            if pool.enable_kv_cache_events:
                pool.kv_event_queue.append(
                    pool._make_stored(
                        _Prefix(),
                        [get_block_hash(key)],
                        parent if start else None,
                        start,
                        self.block_size,
                        get_group_id(key),
                    )
                )

    def _list_fixed(self) -> list[int]:
        """Ids of blocks that stay where they are: pinned, or in flight.

        In flight is what somebody took from `block_pool`, and what is waited for there: it may be read or
        written at the id it had. O(pinned + waited for), and O(blocks of the pool) where any was taken.
        """
        pool = self.block_pool
        fixed = [*self._pins.list_ids(), *pool.get_watched_ids()]
        if self.total_blocks - pool.free_block_queue.num_free_blocks > len(self._holders):
            fixed += [
                block.block_id for block in pool.blocks[1:] if block.ref_cnt and block not in self._holders
            ]
        return fixed

    def _copy_moves(self, moves: Sequence[BlockMove]) -> None:
        if self._storage is not None:
            self._storage.apply_moves(moves)
        # The ids are exchanged next, which does not fail.
        self._num_moved_blocks += len(moves)


def is_run(block_ids: Sequence[int]) -> bool:
    """Are these consecutive, lowest first? One is, none are not."""
    return len(block_ids) > 0 and list(block_ids) == list(range(block_ids[0], block_ids[0] + len(block_ids)))


def find_parents(drops: Sequence[tuple[_Sequence, KVCacheBlock]]) -> dict[KVCacheBlock, BlockHash | None]:
    """By block the hash of the one before it in its sequence; None for the first, or if that one has none."""
    parents: dict[KVCacheBlock, BlockHash | None] = {}
    for sequence in dict.fromkeys(sequence for sequence, _ in drops):
        parent = None
        for block in sequence.blocks:
            parents[block] = parent
            parent = None if block.block_hash is None else get_block_hash(block.block_hash)
    return {block: parents[block] for _, block in drops}


def count_freed(sequence: _Sequence, left: dict[KVCacheBlock, int]) -> list[KVCacheBlock]:
    """The blocks that become free when this sequence goes after those that went before it.

    Args:
        left: references that would be left of blocks after those; brought up to date.
    """
    freed = []
    for block in sequence.blocks:
        left[block] = left.get(block, block.ref_cnt) - 1
        if left[block] == 0:
            freed.append(block)
    return freed


def check_priority(priority: int) -> None:
    """Raise InvalidArgumentError for what is no priority."""
    if priority not in (0, 1, 2):
        raise InvalidArgumentError(f"priority is {priority!r}; it is 0 (normal), 1 (high) or 2 (urgent)")


def check_sequence_id(sequence_id: int) -> None:
    """Raise InvalidArgumentError for what could be taken for `NO_SEQUENCE`."""
    if sequence_id < 0:
        raise InvalidArgumentError(f"sequence_id is {sequence_id}; ids are 0 or more, -1 stands for none")


def check_request(request: BlockAllocationRequest) -> None:
    """Raise for what no pool can serve."""
    if type(request.num_blocks) is not int:
        raise InvalidTypeError(f"num_blocks is a {type(request.num_blocks).__name__}; it counts blocks")
    if request.num_blocks < 1:
        raise InvalidArgumentError(f"num_blocks is {request.num_blocks}; ask for at least 1 block")
    check_priority(request.priority)
