"""`RunBlockPool`: a block pool that prefers consecutive ids, and can allocate runs."""

from collections.abc import Callable, Iterable
from typing import Any

from kv_pool.contiguous import fragmentation
from kv_pool.contiguous.run_index import IN_USE, PLACEMENTS, FreeRunIndex
from kv_pool.core.arguments import as_count, as_int, check_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_pool import BlockPool
from kv_pool.core.deadlines import read_clock
from kv_pool.core.kv_events import KV_EVENT_TYPES, MEDIUM_GPU, KVEventTypes
from kv_pool.core.pool_part import BlockObserver
from kv_pool.core.pool_state import check_whole
from kv_pool.core.taking import refuse_count, take, take_listed
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockId

DEFAULT_EARLY_SHARE = 0.2
DEFAULT_RUN_LENGTH = 16


# Never compiled, for the reasons that `BlockPool` has; the index and the calls that take blocks are.
class RunBlockPool(BlockPool):
    """A `BlockPool` that indexes its free runs of consecutive block ids, and prefers them.

        >>> from kv_pool.contiguous.run_pool import RunBlockPool
        >>> pool = RunBlockPool(32, True, 16)
        >>> [first] = pool.get_new_blocks(1)
        >>> [block.block_id for block in pool.get_new_run(4)]
        [4, 5, 6, 7]
        >>> pool.get_num_free_blocks(), pool.get_new_run(25)
        (26, None)
        >>> [block.block_id for block in pool.get_new_blocks_after(first, 2)]
        [2, 3]

    Args:
        early_share: to form runs, `get_new_blocks` may take blocks from the first part of the free queue
            instead of strictly in eviction order; this is the size of that part, 0 to 1. At 0 it takes
            exactly the blocks that a `BlockPool` takes.
        placement: where to take a run: "oldest" evicts the oldest cached blocks, "buddy" uses an aligned
            chunk of the next power of two (`BuddySystem`), "first_fit" the lowest ids.

    Attributes:
        run_index: the index of free ids, derived from the free queue; `rebuild_index()` restores it.
        epoch: how many times ids have been exchanged; ids read at another epoch may be stale.

    The other arguments are those of `BlockPool`. Runs speed up transfers, offloading and shrinking. Attention
    kernels do not depend on them.
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
        early_share: float = DEFAULT_EARLY_SHARE,
        placement: str = "oldest",
        policy: Any = None,
        live_curve: bool = False,
    ) -> None:
        if placement not in PLACEMENTS:
            raise InvalidArgumentError(f"placement is {placement!r}; it is one of {', '.join(PLACEMENTS)}")
        if not 0 <= early_share <= 1:
            raise InvalidArgumentError(f"early_share is {early_share}; it is a share of the queue, 0 to 1")
        super().__init__(
            num_gpu_blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events,
            metrics_collector,
            num_hash_lookahead_tokens,
            medium,
            event_types=event_types,
            use_int_block_hashes=use_int_block_hashes,
            dense_events=dense_events,
            clock=clock,
            live_curve=live_curve,
        )
        self.run_index: FreeRunIndex = FreeRunIndex(self.num_gpu_blocks, early_share, placement)
        self.free_index = self.run_index
        self.parts.append(self.run_index)
        # Moves of a compaction whose bytes have arrived, and the epoch in which their ids are the old ones.
        self.copied: list[tuple[BlockId, BlockId]] = []
        self.copied_at: int = -1
        self.rebuild_index()
        if policy is not None:
            self.open_policy(policy)

    def rebuild_index(self) -> None:
        """Rebuild the index from the free queue, such as after a direct change of the queue. O(blocks)."""
        self.run_index.rebuild_from(self)

    def repair(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        """See `BlockPool.repair`. Blocks of an interrupted compaction get the ids where their bytes are."""
        if self.copied_at == self.epoch:
            moved = list(self.blocks)
            for source, target in self.copied:
                moved[source], moved[target] = moved[target], moved[source]
            exchanged = tuple(moved)
            self.blocks = exchanged  # no call from here on, so no interruption
            self.epoch += 1
        super().repair(blocks)

    # ---- taking ----------------------------------------------------------------------------------

    def get_new_blocks_after(self, block: KVCacheBlock, num_blocks: int) -> list[KVCacheBlock]:
        """Like `get_new_blocks`, but prefer the ids directly after `block`'s if they are free and old enough.

        For a sequence that grows, or that continues after its cached prefix.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        check_type("block", block, KVCacheBlock)
        check_whole(self)
        if num_blocks < 0 or num_blocks > self.free_block_queue.num_free_blocks:
            refuse_count(self, num_blocks)
        return take(self, num_blocks, block)

    def get_new_run(self, num_blocks: int) -> list[KVCacheBlock] | None:
        """Take `num_blocks` free blocks with consecutive ids, lowest first.

        The pool's placement chooses the ids (`FreeRunIndex.find`).

        Returns:
            The blocks, each with ref_cnt 1 and no hash. None, with nothing changed, if the free blocks are
            too fragmented; compaction helps. In a pool of more than 131,072 blocks None may also mean that
            this call has not reached the right ids; the next call continues the search.
        Raises:
            OutOfBlocksError: fewer than `num_blocks` are free. Nothing has changed.
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
            Any exception of a reuse watcher; all blocks are back in the queue.
        Cost: a bounded search and O(num_blocks).
        """
        num_blocks = as_count("num_blocks", num_blocks)
        check_whole(self)
        if num_blocks > self.free_block_queue.num_free_blocks:
            refuse_count(self, num_blocks)
        run = self.run_index.find(self, num_blocks)
        if run is not None:
            take_listed(self, run)
        return run

    # ---- queries ---------------------------------------------------------------------------------

    def get_fragmentation_rate(self, run_length: int = DEFAULT_RUN_LENGTH) -> float:
        """Return the share of possible free runs that is lost to fragmentation, 0 to 1. O(number of blocks).

        Counts runs of `run_length`, or shorter ones if fewer blocks are free, see `fragmentation`.
        """
        return fragmentation.get_fragmentation_rate(self.list_free_runs(), run_length)

    def track_fragmentation_rate(self, run_length: int) -> float:
        """Return `get_fragmentation_rate(run_length)` from counters that are kept from the first call on.

        Cost: O(1), for the first call and after ids were exchanged O(number of blocks); if fewer than
        `run_length` are free, O(these). Each later change costs two searches more.
        """
        run_length = as_count("run_length", run_length, 1)
        counter = self.run_index.count_runs(run_length)
        num_runs: int = counter.num_runs
        num_free: int = counter.num_free
        if num_free >= run_length:
            return 1.0 - num_runs / (num_free // run_length)
        ages = self.run_index.ages
        lengths: list[int] = []
        for block in self.free_block_queue.get_all_free_blocks():
            first = block.block_id
            if block.owner is self.block_owner and ages[first - 1] == IN_USE:
                end = ages.find(IN_USE, first)
                lengths.append((len(ages) if end < 0 else end) - first)
        return fragmentation.get_fragmentation_rate(lengths, run_length)

    def get_unusable_share(self, run_length: int = DEFAULT_RUN_LENGTH) -> float:
        """Return U(run_length), the share of free blocks unusable for runs of it, 0 to 1. O(all blocks)."""
        return fragmentation.get_unusable_share(self.list_free_runs(), run_length)

    def list_free_runs(self) -> list[int]:
        """Return the lengths of the maximal runs of free blocks, by id. O(number of blocks)."""
        return [len(run) for run in self.run_index.ages.split(bytes([IN_USE])) if run]
