"""`RunPoolCore`: a block pool and the index of its free runs, kept in step. Use `RunBlockPool`."""

from collections.abc import Callable, Iterable, Sequence

from mypy_extensions import mypyc_attr

from kv_pool.contiguous import fragmentation
from kv_pool.contiguous.run_index import EMPTY, KEPT, FreeRunIndex
from kv_pool.core.arguments import as_int, as_ints, as_list, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.clock import read_clock
from kv_pool.core.eviction_order import DEFAULT_BAND, EMPTY_BAND
from kv_pool.core.freeing import free_all, unpin_all
from kv_pool.core.id_swap import as_pairs, swap_ids
from kv_pool.core.kv_events import KV_EVENT_TYPES, MEDIUM_GPU, KVEventTypes
from kv_pool.core.observer import BlockObserver
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.core.taking import take_first, take_listed
from kv_pool.core.touching import touch_all
from kv_pool.errors import (
    InvalidArgumentError,
    InvalidBlockError,
    KVPoolError,
    OutOfBlocksError,
)

DEFAULT_EARLY_SHARE = 0.2
DEFAULT_RUN_LENGTH = 16


# Each call changes the pool first, all or nothing, and then the index, which can be rebuilt from the pool.
# Whatever interrupts a call therefore ends in a rebuild.
@mypyc_attr(allow_interpreted_subclasses=True)
class RunPoolCore(BlockPoolCore):
    """See `RunBlockPool`."""

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
    ) -> None:
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
        )
        self.early_share: float = early_share
        self.run_index: FreeRunIndex = FreeRunIndex(self.num_gpu_blocks, early_share)
        self.rebuild_index()

    # ---- taking ----------------------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """As `BlockPool.get_new_blocks`, in runs of consecutive ids as long as they can be had cheaply.

        No block is evicted for a run that is not among the first `early_share` of the free queue, as far as
        ages are known. What does not come in runs is taken in eviction order.
        """
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
        return take_in_order(self, 0, num_blocks, None)

    def take_onto(self, blocks: list[KVCacheBlock], num_blocks: int) -> list[KVCacheBlock]:
        return take_in_order(self, 0, num_blocks, blocks)

    def get_new_blocks_after(self, block: KVCacheBlock, num_blocks: int) -> list[KVCacheBlock]:
        """As `get_new_blocks`, but the ids next after `block`'s come first, if they are free and old enough.

        For a sequence that grows, or one that goes on after its cached prefix.
        """
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
        if not isinstance(block, KVCacheBlock):
            refuse_type("block", block, "KVCacheBlock")
        return take_in_order(self, block.block_id + 1, num_blocks, None)

    def take_onto_after(
        self, blocks: list[KVCacheBlock], block: KVCacheBlock, num_blocks: int
    ) -> list[KVCacheBlock]:
        """As `get_new_blocks_after`; the blocks are appended to `blocks` in the same step."""
        return take_in_order(self, block.block_id + 1, num_blocks, blocks)

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
        return self._take_run(None, num_blocks, False)

    def take_run_onto(self, blocks: list[KVCacheBlock], num_blocks: int, spares_kept: bool = False) -> bool:
        """As `get_new_run`; the run is appended to `blocks` in the same step, see `take_onto`.

        Args:
            spares_kept: a run with a block of a band above the default one counts as none.
        Returns:
            False, with nothing changed: no run was found.
        """
        return self._take_run(blocks, num_blocks, spares_kept) is not None

    def _take_run(
        self, onto: list[KVCacheBlock] | None, num_blocks: int, spares_kept: bool
    ) -> list[KVCacheBlock] | None:
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
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
        index = self.run_index
        while True:
            if index.is_stale:
                self.rebuild_index()
            first = index.find_run(num_blocks)
            if first is None or (spares_kept and KEPT in index.ages[first : first + num_blocks]):
                return None
            taken = list(self.blocks[first : first + num_blocks])
            try:
                index.note_range_taken(first, first + num_blocks)
                take_chosen(self, index, taken, onto)
            except BaseException:
                index.is_stale = True
                self.rebuild_index()
                raise
            if not index.is_stale:
                return taken
            # The index is right next time, so that this ends.

    def take_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._take_listed(as_list("blocks", blocks), None)

    def take_listed_onto(self, blocks: list[KVCacheBlock], listed: list[KVCacheBlock]) -> None:
        """As `take_blocks(listed)`; they are appended to `blocks` in the same step, see `take_onto`."""
        self._take_listed(listed, blocks)

    def _take_listed(self, listed: list[KVCacheBlock], onto: list[KVCacheBlock] | None) -> None:
        try:
            take_listed(self, listed, onto)
            self.run_index.note_taken(listed, self.owner)
        except BaseException as error:
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._touch(as_list("blocks", blocks), None)

    def touch_onto(self, blocks: list[KVCacheBlock], onto: list[KVCacheBlock]) -> None:
        self._touch(blocks, onto)

    def _touch(self, listed: list[KVCacheBlock], onto: list[KVCacheBlock] | None) -> None:
        try:
            touch_all(self, listed, onto)
            self.run_index.note_taken(listed, self.owner)
        except BaseException as error:
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise

    # ---- giving back -----------------------------------------------------------------------------

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        listed = as_list("ordered_blocks", ordered_blocks)
        try:
            free_all(self, listed, False)
            num_free = self.free_block_queue.num_free_blocks
            self.run_index.note_freed(listed, self.owner, num_free, self.enable_caching, False)
            if self._placement is not None:
                self._placement.place(listed)
        except BaseException as error:
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise

    def free_out_of(self, ordered_blocks: list[KVCacheBlock]) -> None:
        is_freed = False
        freed = ordered_blocks
        try:
            if self._placement is not None:
                freed = ordered_blocks.copy()
            free_all(self, ordered_blocks, False)
            is_freed = True
            num_free = self.free_block_queue.num_free_blocks
            self.run_index.note_freed(ordered_blocks, self.owner, num_free, self.enable_caching, False)
            ordered_blocks.clear()
            if self._placement is not None:
                self._placement.place(freed)
        except BaseException as error:
            if is_freed:
                ordered_blocks.clear()
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise

    def unpin_blocks(self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]) -> None:
        listed = list(as_list("blocks", blocks))
        try:
            unpin_all(self, listed, on_reuse)
            num_free = self.free_block_queue.num_free_blocks
            self.run_index.note_freed(listed, self.owner, num_free, True, True)
            if self._placement is not None:
                self._placement.place(listed)
        except BaseException as error:
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        listed = as_ints("block_ids", block_ids)
        try:
            super().evict_blocks(listed)
            for block_id in listed:
                if block_id not in self.reuse_watchers:
                    self.run_index.note_emptied(block_id)
        except BaseException as error:
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise

    def reset_prefix_cache(self) -> bool:
        is_done = False
        try:
            is_done = super().reset_prefix_cache()
            if is_done:
                self.run_index.note_all_emptied()
        except BaseException as error:
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise
        return is_done

    def move_to_band(self, blocks: Iterable[KVCacheBlock], band: int) -> None:
        listed = as_list("blocks", blocks)
        try:
            super().move_to_band(listed, band)
            if band == DEFAULT_BAND:
                self.run_index.note_moved(listed, self.run_index.now)
            elif band < DEFAULT_BAND:
                self.run_index.note_moved(listed, EMPTY if band == EMPTY_BAND else EMPTY + 1)
            else:
                self.run_index.note_moved(listed, KEPT)
        except BaseException as error:
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise

    def merge_bands(self) -> None:
        """As `BlockPool.merge_bands`. O(number of blocks)."""
        try:
            super().merge_bands()
            self.rebuild_index()
        except BaseException:
            self.rebuild_index()
            raise

    # ---- looking ---------------------------------------------------------------------------------

    def get_fragmentation_rate(self, run_length: int = DEFAULT_RUN_LENGTH) -> float:
        """Share of the free blocks that cannot serve a run of `run_length`, 0 to 1. O(number of blocks)."""
        if not isinstance(run_length, int):
            run_length = as_int("run_length", run_length)
        return fragmentation.get_unusable_share(self.list_free_runs(), run_length)

    def count_runs(self, run_length: int) -> int:
        """How many disjoint runs of `run_length` the free blocks make. O(number of blocks)."""
        if not isinstance(run_length, int):
            run_length = as_int("run_length", run_length)
        if run_length < 1:
            raise InvalidArgumentError(f"run_length is {run_length}; a run has at least 1 block")
        return sum(length // run_length for length in self.list_free_runs())

    def list_free_runs(self) -> list[int]:
        """The lengths of the maximal runs of free blocks, by id. O(number of blocks)."""
        return self.run_index.list_runs()

    def rebuild_index(self) -> None:
        """Rebuild the index from the free queue, such as after an edit of the queue by hand. O(blocks)."""
        self.run_index.is_stale = True  # until it is done
        if self._unfinished:
            self._recover()
        free = [block for block in self.free_block_queue.get_all_free_blocks() if block.owner is self.owner]
        has_content = [
            (block.block_hash is not None and self.enable_caching) or block.block_id in self.reuse_watchers
            for block in free
        ]
        self.run_index.rebuild(self.num_gpu_blocks, free, has_content)
        if self.eviction_order.is_open:
            num_ordered = 0  # blocks of the default band and those above it, which are last in the queue
            for band, blocks in self.eviction_order.list_bands():
                ours = [block for block in blocks if block.owner is self.owner]
                if band >= DEFAULT_BAND:
                    num_ordered += len(ours)
                if band > DEFAULT_BAND:
                    self.run_index.note_moved(ours, KEPT)
            self.run_index.note_moved(free[: len(free) - num_ordered], EMPTY + 1)
        self.run_index.is_stale = False

    def _follow(self, error: BaseException, was_stale: bool) -> None:
        """Bring the index, which is marked as stale, in line with the pool after a call that raised."""
        if (
            isinstance(error, KVPoolError)
            and not was_stale
            and self.metrics_collector is None
            and self.colder_tiers is None
            and not self.reuse_watchers
        ):
            self.run_index.is_stale = False
            return  # a refusal, with nothing changed
        self.rebuild_index()
        if self._placement is not None and not isinstance(error, KVPoolError):
            self._placement.recover()

    # ---- other ids, other sizes ------------------------------------------------------------------

    def swap_block_ids(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As `BlockPool.swap_block_ids`; a new epoch begins.

        A metrics collector with a method `on_ids_swapped` is called with the pairs.
        """
        listed = as_pairs(pairs)
        try:
            swap_ids(self, listed)
            self.run_index.swap(listed)
        except BaseException as error:
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise
        on_ids_swapped = getattr(self.metrics_collector, "on_ids_swapped", None)
        if on_ids_swapped is not None:
            on_ids_swapped(listed)

    def add_blocks(self, num_blocks: int) -> None:
        try:
            super().add_blocks(num_blocks)
            self.run_index.resize(self.num_gpu_blocks)
        except BaseException as error:
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise

    def remove_last_blocks(self, num_blocks: int) -> None:
        try:
            super().remove_last_blocks(num_blocks)
            self.run_index.resize(self.num_gpu_blocks)
        except BaseException as error:
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise

    def grow(self, num_blocks: int) -> None:
        """Add `num_blocks` free, empty blocks with the highest ids; they are the next to be taken. O(blocks).

        The engine's storage must have room for them already.
        Raises:
            InvalidArgumentError: `num_blocks` is negative. Nothing has changed.
        """
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
        if num_blocks < 0:
            raise InvalidArgumentError(f"the pool cannot grow by {num_blocks} blocks; see shrink()")
        self.add_blocks(num_blocks)

    def shrink(self, num_blocks: int) -> None:
        """Remove the `num_blocks` blocks with the highest ids, all of which must be free. O(blocks).

        A cached block is evicted, and its reuse watcher is called.
        Raises:
            InvalidArgumentError: negative, or no null block would be left. Nothing has changed.
            InvalidBlockError: one of them is in use: move it out of the way with `plan_drain`. Nothing has
                changed.
        """
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
        if not 0 <= num_blocks < self.num_gpu_blocks:
            raise InvalidArgumentError(
                f"the pool has {self.num_gpu_blocks} blocks and cannot shrink by {num_blocks}"
            )
        self.remove_last_blocks(num_blocks)


def take_in_order(
    pool: RunPoolCore, next_id: int, num_blocks: int, onto: list[KVCacheBlock] | None
) -> list[KVCacheBlock]:
    """Take blocks in runs, by preference from `next_id` on (0 for anywhere), or else in eviction order."""
    index = pool.run_index
    least = 0 if next_id else 1  # a block alone is no run
    try:
        if pool.early_share and num_blocks > least:
            if index.is_stale:
                pool.rebuild_index()
            in_runs = take_in_runs(pool, index, next_id, num_blocks, onto)
            if in_runs is not None:
                return in_runs
        if index.is_stale:
            pool.rebuild_index()
        taken = take_first(pool, num_blocks, onto)
        index.note_taken(taken, pool.owner)
    except BaseException as error:
        was_stale = index.is_stale
        index.is_stale = True
        pool._follow(error, was_stale)
        raise
    return taken


def take_in_runs(
    pool: RunPoolCore, index: FreeRunIndex, next_id: int, num_blocks: int, onto: list[KVCacheBlock] | None
) -> list[KVCacheBlock] | None:
    """Take `num_blocks` blocks in long runs, by preference from `next_id` on; see `FreeRunIndex.choose`.

    Return None, with nothing taken, if fewer blocks are free, or if the index was wrong; it `is_stale` then.
    Raises:
        As `take_blocks`. Nothing was taken; the index is stale.
    """
    if num_blocks > pool.free_block_queue.num_free_blocks:
        return None
    try:
        chosen = index.choose(pool.blocks, pool.free_block_queue, next_id, num_blocks)
    except BaseException:
        index.is_stale = True
        raise
    if len(chosen) < num_blocks:
        index.is_stale = True
        return None
    take_chosen(pool, index, chosen, onto)
    return None if index.is_stale else chosen


def take_chosen(
    pool: RunPoolCore, index: FreeRunIndex, chosen: list[KVCacheBlock], onto: list[KVCacheBlock] | None
) -> None:
    """Take blocks that the index counts as in use already; if they were not all free, it is stale.

    Raises:
        Whatever a reuse watcher raises, or interrupts it. Nothing was taken; the index is stale.
    """
    may_call_others = len(pool.reuse_watchers) > 0
    try:
        take_listed(pool, chosen, onto)
    except BaseException as error:
        index.is_stale = True
        if may_call_others or not isinstance(error, InvalidBlockError):
            raise
