"""`RunBlockPool`: a block pool that hands out consecutive ids where it can, and on request nothing else."""

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from kv_pool.contiguous import fragmentation, run_calls
from kv_pool.contiguous.run_index import FreeRunIndex
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_pool import BlockPool
from kv_pool.errors import InvalidArgumentError, InvalidTypeError, OutOfBlocksError

DEFAULT_EARLY_SHARE = 0.2
DEFAULT_RUN_LENGTH = 16


class RunBlockPool(BlockPool):
    """A `BlockPool` that knows its free runs of consecutive block ids, and prefers them.

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
        early_share: `get_new_blocks` may take, for the sake of a run, what is not next in eviction order
            but among the first of so large a share of the queue, 0 to 1. At 0 it takes exactly what a
            `BlockPool` takes.
        Others: as of `BlockPool`.

    Attributes:
        run_index: which ids are free; derived, `rebuild_index()` makes it anew.
        epoch: how many times ids have been exchanged; an id that was read at another epoch may have moved.

    Runs serve transfers, offloading and shrinking. Attention kernels do not care.
    """

    def __init__(self, *arguments: Any, early_share: float = DEFAULT_EARLY_SHARE, **options: Any) -> None:
        if not 0 <= early_share <= 1:
            raise InvalidArgumentError(f"early_share is {early_share}; it is a share of the queue, 0 to 1")
        super().__init__(*arguments, **options)
        self.early_share = early_share
        self.epoch = 0
        self.run_index = FreeRunIndex(self.num_gpu_blocks, early_share)
        self.rebuild_index()

    # ---- taking ----------------------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """As `BlockPool.get_new_blocks`, in runs of consecutive ids as long as they can be had cheaply.

        No block is evicted for a run that is not among the first `early_share` of the free queue, as far as
        ages are known. What does not come in runs is taken in eviction order.
        """
        if self.early_share and isinstance(num_blocks, int) and num_blocks > 1:
            index = self.run_index
            try:
                in_runs = run_calls.take_in_runs(self, index, 0, num_blocks)
            except BaseException:
                self.rebuild_index()
                raise
            if in_runs is not None:
                return in_runs
            if index.is_stale:
                self.rebuild_index()
        taken = super().get_new_blocks(num_blocks)
        self.run_index.note_taken(taken, self._owner)
        return taken

    def get_new_blocks_after(self, block: KVCacheBlock, num_blocks: int) -> list[KVCacheBlock]:
        """As `get_new_blocks`, but the ids next after `block`'s come first, if they are free and old enough.

        For a sequence that grows, or one that goes on after its cached prefix.
        """
        if self.early_share and isinstance(num_blocks, int) and num_blocks > 0:
            # As above: another call costs a tenth of what taking a request's blocks does.
            index = self.run_index
            try:
                taken = run_calls.take_in_runs(self, index, block.block_id + 1, num_blocks)
            except BaseException:
                self.rebuild_index()
                raise
            if taken is not None:
                return taken
            if index.is_stale:
                self.rebuild_index()
        return self.get_new_blocks(num_blocks)

    def get_new_run(self, num_blocks: int) -> list[KVCacheBlock] | None:
        """Take `num_blocks` free blocks with consecutive ids, lowest first.

        Of the places that the search meets, the one whose youngest block was used longest ago, and of those
        one at a multiple of the next power of two (`FreeRunIndex.find_run`). Nothing is taken beyond
        `num_blocks`.

        Returns:
            The blocks, each with ref_cnt 1 and no hash; None when the free blocks are too scattered, with
            nothing changed: compaction helps then. In a pool of more than 131,072 blocks None can also mean
            that this call did not come to the right place; the next one looks further.
        Raises:
            OutOfBlocksError: fewer than `num_blocks` are free. Nothing has changed.
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
            Whatever a reuse watcher raises; all blocks are back in the queue.
        Cost: a bounded search and O(num_blocks).
        """
        if not isinstance(num_blocks, int):
            raise InvalidTypeError(f"num_blocks is a {type(num_blocks).__name__}; it counts blocks, an int")
        if num_blocks < 0:
            raise InvalidArgumentError(f"asked for {num_blocks} blocks; the count is 0 or more")
        num_free = self.free_block_queue.num_free_blocks
        if num_blocks > num_free:
            raise OutOfBlocksError(
                f"asked for a run of {num_blocks} blocks, {num_free} are free of {self.num_gpu_blocks - 1}. "
                "Free a request, or ask for fewer."
            )
        if num_blocks == 0:
            return []
        first = self.run_index.find_run(num_blocks)
        if first is None:
            return None
        taken = list(self.blocks[first : first + num_blocks])
        self.run_index.note_range_taken(first, first + num_blocks)
        index = self.run_index
        try:
            run_calls.take_chosen(self, index, taken)
            was_right = not index.is_stale
        finally:
            if index.is_stale:
                self.rebuild_index()
        # The index is right now, so that this ends.
        return taken if was_right else self.get_new_run(num_blocks)

    def take_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        listed = blocks if isinstance(blocks, list) else list(blocks)
        super().take_blocks(listed)
        self.run_index.note_taken(listed, self._owner)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        run_calls.touch(self, self.run_index, blocks)

    # ---- giving back -----------------------------------------------------------------------------

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        run_calls.free_blocks(self, self.run_index, ordered_blocks)

    def unpin_blocks(self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]) -> None:
        listed = list(blocks)
        super().unpin_blocks(listed, on_reuse)
        num_free = self.free_block_queue.num_free_blocks
        self.run_index.note_freed(listed, self._owner, num_free, True, True)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        listed = list(block_ids)
        super().evict_blocks(listed)
        for block_id in listed:
            if block_id not in self._reuse_watchers:
                self.run_index.note_emptied(block_id)

    def reset_prefix_cache(self) -> bool:
        is_done = super().reset_prefix_cache()
        if is_done:
            self.run_index.note_all_emptied()
        return is_done

    # ---- looking ---------------------------------------------------------------------------------

    def get_fragmentation_rate(self, run_length: int = DEFAULT_RUN_LENGTH) -> float:
        """Share of the free blocks that cannot serve a run of `run_length`, 0 to 1. O(number of blocks)."""
        return fragmentation.get_unusable_share(self.list_free_runs(), run_length)

    def count_runs(self, run_length: int) -> int:
        """How many disjoint runs of `run_length` the free blocks make. O(number of blocks)."""
        if run_length < 1:
            raise InvalidArgumentError(f"run_length is {run_length}; a run has at least 1 block")
        return sum(length // run_length for length in self.list_free_runs())

    def list_free_runs(self) -> list[int]:
        """The lengths of the maximal runs of free blocks, by id. O(number of blocks)."""
        return self.run_index.list_runs()

    def get_watched_ids(self) -> Set[int]:
        """The ids of blocks whose reuse somebody waits for; their content may still be read."""
        return self._reuse_watchers.keys()

    def rebuild_index(self) -> None:
        """Make the index anew from the free queue, as after an edit of the queue by hand. O(blocks)."""
        free = [block for block in self.free_block_queue.get_all_free_blocks() if block._owner is self._owner]
        has_content = [
            (block.block_hash is not None and self.enable_caching) or block.block_id in self._reuse_watchers
            for block in free
        ]
        self.run_index.rebuild(self.num_gpu_blocks, free, has_content)

    # ---- other ids, other sizes ------------------------------------------------------------------

    def swap_block_ids(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As `BlockPool.swap_block_ids`; a new epoch begins.

        A metrics collector with a method `on_ids_swapped` is called with the pairs.
        """
        super().swap_block_ids(pairs)
        on_ids_swapped = getattr(self.metrics_collector, "on_ids_swapped", None)
        if on_ids_swapped is not None:
            on_ids_swapped(pairs)
        self.run_index.swap(pairs)
        self.epoch += 1

    def grow(self, num_blocks: int) -> None:
        """Add `num_blocks` free, empty blocks with the highest ids; they are the next to be taken. O(blocks).

        The engine's storage must have room for them already.
        Raises:
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
        """
        if num_blocks < 0:
            raise InvalidArgumentError(f"the pool cannot grow by {num_blocks} blocks; see shrink()")
        self.add_blocks(num_blocks)
        self.run_index.resize(self.num_gpu_blocks)

    def shrink(self, num_blocks: int) -> None:
        """Remove the `num_blocks` blocks with the highest ids, all of which must be free. O(blocks).

        One that is cached is evicted; whoever waits for its reuse is told.
        Raises:
            InvalidArgumentError: negative, or no null block would be left. Nothing has changed.
            InvalidBlockError: one of them is in use: move it out of the way with `plan_drain`. Nothing has
                changed.
        """
        if not 0 <= num_blocks < self.num_gpu_blocks:
            raise InvalidArgumentError(
                f"the pool has {self.num_gpu_blocks} blocks and cannot shrink by {num_blocks}"
            )
        self.remove_last_blocks(num_blocks)
        self.run_index.resize(self.num_gpu_blocks)
