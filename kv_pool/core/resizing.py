"""Grow or shrink a pool at the high end of its block ids."""

from typing import cast

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.evicting import evict
from kv_pool.core.pool_state import PoolState, set_blocks
from kv_pool.core.taking import notify_watchers_off_queue
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import BlockId


def add_last(pool: PoolState, num_blocks: int) -> None:
    """Implement `BlockPool.add_blocks`."""
    if num_blocks < 0:
        raise InvalidArgumentError(f"the pool cannot grow by {num_blocks} blocks; see remove_last_blocks()")
    if num_blocks == 0:
        return
    first, end = pool.num_gpu_blocks, pool.num_gpu_blocks + num_blocks
    added = [KVCacheBlock(cast(BlockId, block_id)) for block_id in range(first, end)]
    pool.is_changing = True
    for block in added:
        block.owner = pool.block_owner
    pool.free_block_queue.prepend_n(added)
    set_blocks(pool, pool.blocks + tuple(added))
    pool.is_changing = False


def remove_last(pool: PoolState, num_blocks: int) -> None:
    """Implement `BlockPool.remove_last_blocks`."""
    if num_blocks < 0:
        raise InvalidArgumentError(f"the pool cannot shrink by {num_blocks} blocks; see add_blocks()")
    if num_blocks == 0:
        return
    num_left = max(0, pool.num_gpu_blocks - num_blocks)
    removed = list(pool.blocks[num_left:])
    for block in removed:
        if block.ref_cnt != 0 or block.is_null:
            raise InvalidBlockError(
                f"block {block.block_id} is {'null' if block.is_null else 'in use'}; only free blocks "
                "can be removed. Move it to a lower id first."
            )
    if pool.lower_tiers is not None:
        pool.lower_tiers.flush_evicted()  # the tiers may still have to copy bytes of removed blocks
    if pool.reuse_watchers:
        notify_watchers_off_queue(pool, removed)
    pool.is_changing = True
    for block in removed:
        if pool.metrics_collector is not None:
            pool.metrics_collector.on_block_evicted(block)
        evict(pool, block)
        pool.free_block_queue.remove(block)
        block.generation += 1
    pool._last_found = pool.null_block
    set_blocks(pool, pool.blocks[:num_left])
    for part in pool.parts:
        part.note_removed(removed)
    pool.is_changing = False
