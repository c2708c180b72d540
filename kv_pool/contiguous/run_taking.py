"""Functions that take free blocks in runs of consecutive ids where that is cheap, else in eviction order."""

from kv_pool.contiguous.run_index import FreeRunIndex
from kv_pool.contiguous.run_pool_state import RunPoolState
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.taking import take_listed
from kv_pool.errors import (
    InvalidBlockError,
)
from kv_pool.ids import BlockId


def take_in_order(
    pool: RunPoolState, next_id: BlockId, num_blocks: int, onto: list[KVCacheBlock] | None
) -> list[KVCacheBlock]:
    """Take blocks in runs, preferably from `next_id` on (0: anywhere), else in eviction order."""
    index = pool.run_index
    least = 0 if next_id else 1  # a block alone is no run
    try:
        if pool._policy_host is not None:
            pass  # the policy chooses each block
        elif pool.early_share and num_blocks > least:
            if index.is_stale:
                pool.rebuild_index()
            in_runs = take_in_runs(pool, index, next_id, num_blocks, onto)
            if in_runs is not None:
                return in_runs
        elif pool.early_share and num_blocks == 1:
            fragment = take_fragment(pool, index, onto)
            if fragment is not None:
                return fragment
        if index.is_stale:
            pool.rebuild_index()
        taken = RunPoolState.take_onto(pool, onto, num_blocks)  # not the pool's own, which calls this
        index.note_taken(taken, pool.block_owner)
    except BaseException as error:
        was_stale = index.is_stale
        index.is_stale = True
        pool._follow(error, was_stale)
        raise
    return taken


def take_in_runs(
    pool: RunPoolState,
    index: FreeRunIndex,
    next_id: BlockId,
    num_blocks: int,
    onto: list[KVCacheBlock] | None,
) -> list[KVCacheBlock] | None:
    """Take `num_blocks` blocks in long runs, from `next_id` on if free: see `FreeRunIndex.choose_and_mark`.

    Return None, with nothing taken, if fewer blocks are free, or if the index was wrong and now `is_stale`.

    Raises:
        As `take_blocks`. Nothing was taken; the index is stale.
    """
    if num_blocks > pool.free_block_queue.num_free_blocks:
        return None
    try:
        chosen = index.choose_and_mark(pool.blocks, pool.free_block_queue, next_id, num_blocks)
    except BaseException:
        index.is_stale = True
        raise
    if len(chosen) < num_blocks:
        index.is_stale = True
        return None
    take_chosen(pool, index, chosen, onto)
    return None if index.is_stale else chosen


def take_fragment(
    pool: RunPoolState, index: FreeRunIndex, onto: list[KVCacheBlock] | None
) -> list[KVCacheBlock] | None:
    """Take one block of a small chunk, to keep large chunks whole; return None if there is none."""
    if index.is_stale:
        pool.rebuild_index()
    block_id = index.find_fragment()
    if block_id == 0:
        return None
    index.note_range_taken(block_id, block_id + 1)
    chosen = [pool.blocks[block_id]]
    take_chosen(pool, index, chosen, onto)
    return None if index.is_stale else chosen


def take_chosen(
    pool: RunPoolState, index: FreeRunIndex, chosen: list[KVCacheBlock], onto: list[KVCacheBlock] | None
) -> None:
    """Take blocks that the index already counts as in use; mark it stale if they were not all free.

    Raises:
        Any exception of a reuse watcher, or an interrupt. Nothing was taken; the index is stale.
    """
    may_call_others = len(pool.reuse_watchers) > 0
    try:
        take_listed(pool, chosen, onto)
    except BaseException as error:
        index.is_stale = True
        if may_call_others or not isinstance(error, InvalidBlockError):
            raise
