"""The pool's calls that its run index hears of: one compiled call each, since every request makes them."""

from collections.abc import Iterable, Sequence

from kv_pool.contiguous.run_index import FreeRunIndex
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidBlockError


def take_in_runs(
    pool: BlockPoolCore, index: FreeRunIndex, next_id: int, num_blocks: int
) -> list[KVCacheBlock] | None:
    """Take `num_blocks` blocks in long runs, by preference from `next_id` on; see `FreeRunIndex.choose`.

    None, with nothing taken: there are not so many, or the index was wrong and `is_stale` now.
    Raises:
        As `take_blocks`. Nothing was taken; the index is stale.
    """
    if num_blocks > pool.free_block_queue.num_free_blocks:
        return None
    chosen = index.choose(pool.blocks, pool.free_block_queue, next_id, num_blocks)
    if len(chosen) < num_blocks:
        index.is_stale = True
        return None
    take_chosen(pool, index, chosen)
    return None if index.is_stale else chosen


def take_chosen(pool: BlockPoolCore, index: FreeRunIndex, chosen: list[KVCacheBlock]) -> None:
    """Take blocks that the index counts as in use already; if they were not all free, it is stale.

    Raises:
        Whatever a reuse watcher raises. Nothing was taken; the index is stale.
    """
    may_call_others = len(pool._reuse_watchers) > 0
    try:
        BlockPoolCore.take_blocks(pool, chosen)
    except BaseException as error:
        index.is_stale = True
        if may_call_others or not isinstance(error, InvalidBlockError):
            raise


def touch(pool: BlockPoolCore, index: FreeRunIndex, blocks: Sequence[KVCacheBlock]) -> None:
    """`BlockPool.touch`, and the index knows of it."""
    listed: list[KVCacheBlock] = blocks if isinstance(blocks, list) else list(blocks)
    BlockPoolCore.touch(pool, listed)
    index.note_taken(listed, pool._owner)


def free_blocks(pool: BlockPoolCore, index: FreeRunIndex, ordered_blocks: Iterable[KVCacheBlock]) -> None:
    """`BlockPool.free_blocks`, and the index knows of it."""
    listed: list[KVCacheBlock] = ordered_blocks if isinstance(ordered_blocks, list) else list(ordered_blocks)
    BlockPoolCore.free_blocks(pool, listed)
    num_free = pool.free_block_queue.num_free_blocks
    index.note_freed(listed, pool._owner, num_free, pool.enable_caching, False)
