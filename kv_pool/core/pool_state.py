"""`PoolState`: the state of a block pool, which all modules that change it import; with `ContentOrigins`."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, cast
from weakref import ref

from mypy_extensions import i32, mypyc_attr

from kv_pool.core.arguments import as_count, as_int, check_type, refuse_interrupted
from kv_pool.core.block import COMPILED, KVCacheBlock
from kv_pool.core.deadlines import read_clock
from kv_pool.core.eviction_order import EvictionOrder
from kv_pool.core.free_queue import FreeKVCacheBlockQueue
from kv_pool.core.hash_map import BlockHashToBlockMap
from kv_pool.core.holds import BlockHolds
from kv_pool.core.kv_events import KV_EVENT_TYPES, MEDIUM_GPU, KVCacheEvent, KVEventTypes
from kv_pool.core.live_curve import LiveCurve
from kv_pool.core.policy_host import open_policy
from kv_pool.core.pool_part import BlockObserver, FreeIndex, LowerTiers, PoolPart
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHashWithGroupId, BlockId

_UNCHECKED_BLOCKS: Final = 10_000_000
"""A pool of at most this size takes 1 to 2 GB, and is not compared with this machine's memory."""


class ReuseWatcher(NamedTuple):
    """A callback that is called before a block is reused. `since` is a time of the pool's clock."""

    on_reuse: Callable[[KVCacheBlock], None]
    since: float


@mypyc_attr(allow_interpreted_subclasses=False)
class ContentOrigins:
    """The copies that were made in one pool, and what continues them; for reports of content that is bad.

    Attributes:
        copied_from: copies of blocks, of this pool or another: see `note_copy`.
        continued_by: blocks whose copies were continued by other requests: see `note_continued`.
    """

    def __init__(self) -> None:
        self.copied_from: dict[KVCacheBlock, tuple[int, KVCacheBlock, int]] = {}
        self.continued_by: dict[KVCacheBlock, tuple[int, list[tuple[int, Any]]]] = {}
        self._num_continued_to_sweep_at: int = 64

    def note_copy(self, target: KVCacheBlock, source: KVCacheBlock) -> None:
        """Note that `target` is a copy of `source`: valid while the generations of both are those of now."""
        self.copied_from[target] = (target.generation, source, source.generation)

    def note_continued(self, source: KVCacheBlock, start: int, hashes: Any) -> None:
        """Note that a request continues a copy of a block that is not full, under hashes of its own.

        Args:
            start: the block's first token.
            hashes: the request's `block_hashes`, which may still grow.
        The note is valid while the generation of `source` is that of now.
        """
        noted = self.continued_by.get(source)
        if noted is None or noted[0] != source.generation:
            if len(self.continued_by) >= self._num_continued_to_sweep_at:
                for block, one in list(self.continued_by.items()):
                    if block.generation != one[0]:
                        del self.continued_by[block]
                self._num_continued_to_sweep_at = max(64, 2 * len(self.continued_by))
            noted = self.continued_by[source] = source.generation, []
        noted[1].append((start, hashes))


@mypyc_attr(allow_interpreted_subclasses=True)
class PoolState:
    """The state of a pool. Functions of the other modules of this package change it.

    A function first checks its arguments, then sets `is_changing`, changes the state, and restores the flag.
    Whatever interrupts the change leaves the flag set, and each later call of the pool raises
    PoolInterruptedError until `repair`. That reads only the blocks, the holds, the tables and the links that
    have survived: it needs to know nothing about the call that was interrupted.

    Attributes:
        is_changing: a call changes the pool now, or has been interrupted while it did.
        parts: what follows each change, such as an index of runs, a band policy, a curve; in this order.
        free_index: the part that chooses which free blocks are taken; None: those in front of the queue.
        origins: which blocks are copies of others.
        evictions_by_cause: the part of `num_evictions` that is not due to the reuse of blocks, see
            `evicting.count_cause`. Reuse is the rest, so that taking blocks counts nothing twice.
        num_repairs: number of repairs after interrupted calls.
        num_checks, num_failed_checks: number of checks of the invariants, and of those that failed.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: BlockObserver | None = None,
        num_hash_lookahead_tokens: int = 0,
        medium: str = MEDIUM_GPU,
        *,
        event_types: KVEventTypes = KV_EVENT_TYPES,
        use_int_block_hashes: bool = True,
        dense_events: bool = False,
        clock: Callable[[], float] = read_clock,
        policy: Any = None,
        live_curve: bool = False,
    ) -> None:
        num_gpu_blocks = as_int("num_gpu_blocks", num_gpu_blocks)
        check_type("enable_caching", enable_caching, bool)
        check_type("medium", medium, str)
        check_type("live_curve", live_curve, bool)
        if num_gpu_blocks < 1:
            raise InvalidArgumentError(
                f"num_gpu_blocks is {num_gpu_blocks!r}; a pool has at least 1 block, its null block"
            )
        if num_gpu_blocks > _UNCHECKED_BLOCKS:
            from kv_pool.core.pool_size import check_fits_memory

            check_fits_memory(num_gpu_blocks)
        blocks = [KVCacheBlock(cast(BlockId, number)) for number in range(num_gpu_blocks)]
        if not isinstance(hash_block_size, int) or hash_block_size < 1:
            raise InvalidArgumentError(
                f"hash_block_size is {hash_block_size!r}; it counts tokens, at least 1"
            )
        self.hash_block_size: int = hash_block_size
        self.enable_kv_cache_events: bool = enable_kv_cache_events
        self.metrics_collector: BlockObserver | None = metrics_collector
        self.num_hash_lookahead_tokens: int = as_count("num_hash_lookahead_tokens", num_hash_lookahead_tokens)
        self.medium: str = medium
        self.stored_type: Any = event_types.stored
        self.removed_type: Any = event_types.removed
        self.cleared_type: Any = event_types.cleared
        self.reported_type: Any = event_types.reported or event_types.stored
        self.use_int_block_hashes: bool = use_int_block_hashes
        self.dense_events: bool = dense_events
        self.num_evictions: int = 0
        self.evictions_by_cause: dict[str, int] = {}
        self.num_repairs: int = 0
        self.num_checks: int = 0
        self.num_failed_checks: int = 0
        self.origins: ContentOrigins = ContentOrigins()
        self.lower_tiers: LowerTiers | None = None
        self.cached_block_hash_to_block: BlockHashToBlockMap = BlockHashToBlockMap()
        # Secondary keys, oldest first: block id -> {key: None}. The primary key is on the block.
        self.cached_block_hashes_by_block: dict[BlockId, dict[BlockHashWithGroupId, None]] = {}
        self._kv_event_queue: list[KVCacheEvent] = []
        self.is_changing: bool = False
        # Compiled, a Final attribute cannot be assigned from outside: blocks compare it with their own.
        self.block_owner: Final[Any] = ref(self)
        for block in blocks:
            block.owner = self.block_owner
        # The cyclic GC untracks a tuple of objects without GC headers at its first visit (but never a list).
        # Collect now, so that this visit does not happen while requests are served.
        self.blocks: tuple[KVCacheBlock, ...] = tuple(blocks)
        gc.collect(0)
        # The block that was looked up last: the next lookup is likely for the block cached after it. Checking
        # that guess is cheaper than the map in compiled code, but slower in interpreted code.
        self._last_found: KVCacheBlock = self.blocks[0]
        self._num_guessable: i32 = len(blocks) if COMPILED else 0
        self.num_gpu_blocks: int = len(blocks)
        self.enable_caching: bool = enable_caching
        self.free_block_queue: FreeKVCacheBlockQueue = FreeKVCacheBlockQueue(blocks)
        self.reuse_watchers: dict[BlockId, ReuseWatcher] = {}
        self.holds: BlockHolds = BlockHolds(self.block_owner, clock)
        self.holds.open_place_hold("watched until its reuse", partial(get_watched_blocks, self.block_owner))
        self.eviction_order: EvictionOrder = EvictionOrder(self.free_block_queue)
        self.parts: list[PoolPart] = []
        self.free_index: FreeIndex | None = None
        self.epoch: int = 0
        self.null_block: KVCacheBlock = self.free_block_queue.popleft()
        self.null_block.is_null = True
        if live_curve:
            self.parts.append(LiveCurve(len(blocks) - 1, hash_block_size, clock))
        if policy is not None:
            open_policy(self, policy)

    @property
    def kv_event_queue(self) -> list[KVCacheEvent]:
        """The events since the last `take_events()`. A property, so that a subclass may override it."""
        return self._kv_event_queue

    @kv_event_queue.setter
    def kv_event_queue(self, events: list[KVCacheEvent]) -> None:
        self._kv_event_queue = events


def check_whole(pool: PoolState) -> None:
    """Raise PoolInterruptedError if a call of the pool was interrupted."""
    if pool.is_changing:
        refuse_interrupted()


def set_blocks(pool: PoolState, blocks: tuple[KVCacheBlock, ...]) -> None:
    """Set the pool's blocks, and what depends on their number."""
    num_blocks = len(blocks)
    pool.blocks = blocks
    pool.num_gpu_blocks = num_blocks
    if pool._num_guessable:
        pool._num_guessable = num_blocks
    for part in pool.parts:
        part.note_resized(num_blocks)


def get_watched_blocks(owner: Any) -> dict[KVCacheBlock, float]:
    """Return the blocks that have a reuse watcher, each with the time since which it has one.

    Args:
        owner: the weak reference to the pool that its blocks share.
    """
    pool: PoolState = owner()
    blocks = pool.blocks
    return {
        blocks[block_id]: watcher.since
        for block_id, watcher in pool.reuse_watchers.items()
        if block_id < len(blocks)
    }
