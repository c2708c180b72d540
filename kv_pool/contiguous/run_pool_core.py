"""`RunPoolCore`: a block pool that keeps the index of its free runs up to date. Use `RunBlockPool`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, cast

from mypy_extensions import mypyc_attr

from kv_pool.contiguous import fragmentation
from kv_pool.contiguous.ages import RETAINED
from kv_pool.contiguous.free_ages import note_moved
from kv_pool.contiguous.run_pool_state import RunPoolState
from kv_pool.contiguous.run_taking import take_chosen, take_in_order
from kv_pool.core.arguments import as_count, as_int, as_ints, as_list, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.freeing import free_all, unpin_all
from kv_pool.core.id_swap import as_pairs, swap_ids
from kv_pool.core.taking import take_listed
from kv_pool.errors import (
    InvalidArgumentError,
    OutOfBlocksError,
)
from kv_pool.ids import BlockId

DEFAULT_RUN_LENGTH = 16

_ANYWHERE: Final = cast(BlockId, 0)


@mypyc_attr(allow_interpreted_subclasses=True)
class RunPoolCore(RunPoolState):
    """See `RunBlockPool`."""

    # ---- allocating ------------------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Like `BlockPool.get_new_blocks`, but prefer runs of consecutive ids where that is cheap.

        To form runs, it evicts only blocks among the first `early_share` of the free queue, as far as ages
        tell. It takes the remaining blocks in eviction order.
        """
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
        return take_in_order(self, _ANYWHERE, num_blocks, None)

    def take_onto(self, onto: list[KVCacheBlock] | None, num_blocks: int) -> list[KVCacheBlock]:
        return take_in_order(self, _ANYWHERE, num_blocks, onto)

    def get_new_blocks_after(self, block: KVCacheBlock, num_blocks: int) -> list[KVCacheBlock]:
        """Like `get_new_blocks`, but prefer the ids directly after `block`'s if they are free and old enough.

        For a sequence that grows, or that continues after its cached prefix.
        """
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
        if not isinstance(block, KVCacheBlock):
            refuse_type("block", block, "KVCacheBlock")
        return take_in_order(self, cast(BlockId, block.block_id + 1), num_blocks, None)

    def take_onto_after(
        self, blocks: list[KVCacheBlock], block: KVCacheBlock, num_blocks: int
    ) -> list[KVCacheBlock]:
        """Like `get_new_blocks_after`, but append the blocks to `blocks` in the same step."""
        return take_in_order(self, cast(BlockId, block.block_id + 1), num_blocks, blocks)

    def get_new_run(self, num_blocks: int) -> list[KVCacheBlock] | None:
        """Take `num_blocks` free blocks with consecutive ids, lowest first.

        The pool's placement chooses the ids (`FreeRunIndex.find_run`).

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
        return self._take_run(None, num_blocks, False)

    def take_run_onto(
        self, blocks: list[KVCacheBlock], num_blocks: int, avoids_retained: bool = False
    ) -> bool:
        """Like `get_new_run`, but append the run to `blocks` in the same step, see `take_onto`.

        Args:
            avoids_retained: do not take a run with a block of a band above the default one.
        Returns:
            Whether a run was taken; if False, nothing has changed.
        """
        return self._take_run(blocks, num_blocks, avoids_retained) is not None

    def _take_run(
        self, onto: list[KVCacheBlock] | None, num_blocks: int, avoids_retained: bool
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
            if first is None or (avoids_retained and RETAINED in index.ages[first : first + num_blocks]):
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
            # The rebuilt index is right, so the second round ends the loop.

    def take_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._take_listed(as_list("blocks", blocks), None)

    def take_listed_onto(self, blocks: list[KVCacheBlock], listed: list[KVCacheBlock]) -> None:
        """Like `take_blocks(listed)`, but append the blocks to `blocks` in the same step, see `take_onto`."""
        self._take_listed(listed, blocks)

    def _take_listed(self, listed: list[KVCacheBlock], onto: list[KVCacheBlock] | None) -> None:
        try:
            take_listed(self, listed, onto)
            self.run_index.note_taken(listed, self.block_owner)
        except BaseException as error:
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.touch_onto(as_list("blocks", blocks), None)

    def touch_onto(
        self, listed: list[KVCacheBlock], onto: list[KVCacheBlock] | None, is_access: bool = True
    ) -> None:
        try:
            super().touch_onto(listed, onto, is_access)
            self.run_index.note_taken(listed, self.block_owner)
        except BaseException as error:
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise

    # ---- freeing ---------------------------------------------------------------------------------

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        listed = as_list("ordered_blocks", ordered_blocks)
        try:
            free_all(self, listed, False)
            num_free = self.free_block_queue.num_free_blocks
            self.run_index.note_freed(listed, self.block_owner, num_free, self.enable_caching, False)
            if self._band_policy is not None:
                self._band_policy.place(listed)
        except BaseException as error:
            if self._policy_host is not None:
                self._policy_host.is_stale = True
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise

    def free_out_of(self, ordered_blocks: list[KVCacheBlock]) -> None:
        is_freed = False
        freed = ordered_blocks
        try:
            if self._band_policy is not None:
                freed = ordered_blocks.copy()
            free_all(self, ordered_blocks, False)
            is_freed = True
            num_free = self.free_block_queue.num_free_blocks
            self.run_index.note_freed(ordered_blocks, self.block_owner, num_free, self.enable_caching, False)
            ordered_blocks.clear()
            if self._band_policy is not None:
                self._band_policy.place(freed)
        except BaseException as error:
            if self._policy_host is not None:
                self._policy_host.is_stale = True
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
            self.run_index.note_freed(listed, self.block_owner, num_free, True, True)
            if self._band_policy is not None:
                self._band_policy.place_unpinned(listed)
        except BaseException as error:
            if self._policy_host is not None:
                self._policy_host.is_stale = True
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise

    def evict_blocks(self, block_ids: Iterable[BlockId]) -> None:
        listed = cast("list[BlockId]", as_ints("block_ids", block_ids))
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
            note_moved(self.run_index, listed, band)
        except BaseException as error:
            was_stale = self.run_index.is_stale
            self.run_index.is_stale = True
            self._follow(error, was_stale)
            raise

    def merge_bands(self) -> None:
        """Like `BlockPool.merge_bands`, and rebuild the index. O(number of blocks)."""
        try:
            super().merge_bands()
            self.rebuild_index()
        except BaseException:
            self.rebuild_index()
            raise

    # ---- queries ---------------------------------------------------------------------------------

    def get_fragmentation_rate(self, run_length: int = DEFAULT_RUN_LENGTH) -> float:
        """Return the share of possible free runs that is lost to fragmentation, 0 to 1. O(number of blocks).

        Counts runs of `run_length`, or shorter ones if fewer blocks are free, see `fragmentation`.
        """
        if not isinstance(run_length, int):
            run_length = as_int("run_length", run_length)
        return fragmentation.get_fragmentation_rate(self.list_free_runs(), run_length)

    def track_fragmentation_rate(self, run_length: int) -> float:
        """Return `get_fragmentation_rate(run_length)` from counters that are kept from the first call on.

        Cost: O(1), for the first call and after ids were exchanged O(number of blocks); if fewer than
        `run_length` are free, O(these). Each later change costs two searches more.
        """
        run_length = as_count("run_length", run_length, 1)
        index = self.run_index
        if index.is_stale:
            self.rebuild_index()
        num_runs = index.count_runs(run_length)
        if index.num_free >= run_length:
            return 1.0 - num_runs / (index.num_free // run_length)
        ids = sorted(
            [
                block.block_id
                for block in self.free_block_queue.get_all_free_blocks()
                if block.owner is self.block_owner
            ]
        )
        lengths: list[int] = []
        last = -2
        for block_id in ids:
            if block_id == last + 1:
                lengths[-1] += 1
            else:
                lengths.append(1)
            last = block_id
        return fragmentation.get_fragmentation_rate(lengths, run_length)

    def get_unusable_share(self, run_length: int = DEFAULT_RUN_LENGTH) -> float:
        """Return U(run_length), the share of free blocks unusable for runs of it, 0 to 1. O(all blocks)."""
        if not isinstance(run_length, int):
            run_length = as_int("run_length", run_length)
        return fragmentation.get_unusable_share(self.list_free_runs(), run_length)

    def count_runs(self, run_length: int) -> int:
        """Return how many disjoint runs of `run_length` the free blocks form. O(number of blocks)."""
        if not isinstance(run_length, int):
            run_length = as_int("run_length", run_length)
        if run_length < 1:
            raise InvalidArgumentError(f"run_length is {run_length}; a run has at least 1 block")
        return sum(length // run_length for length in self.list_free_runs())

    def list_free_runs(self) -> list[int]:
        """Return the lengths of the maximal runs of free blocks, by id. O(number of blocks)."""
        return self.run_index.list_runs()

    # ---- changing ids and size -------------------------------------------------------------------

    def swap_block_ids(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Like `BlockPool.swap_block_ids`; starts a new epoch.

        If the metrics collector has a method `on_ids_swapped`, calls it with the pairs.
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

        The engine's storage must already be large enough.

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

        Evicts the cached blocks among them and calls their reuse watchers.

        Raises:
            InvalidArgumentError: `num_blocks` is negative, or no null block would be left. Nothing has
                changed.
            InvalidBlockError: one of them is in use: move it out of the range with `plan_drain`. Nothing has
                changed.
        """
        if not isinstance(num_blocks, int):
            num_blocks = as_int("num_blocks", num_blocks)
        if not 0 <= num_blocks < self.num_gpu_blocks:
            raise InvalidArgumentError(
                f"the pool has {self.num_gpu_blocks} blocks and cannot shrink by {num_blocks}"
            )
        self.remove_last_blocks(num_blocks)
