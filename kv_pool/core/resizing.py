"""Grow or shrink a pool at the high end of its block ids."""

from typing import cast

from kv_pool.core.arguments import as_int
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.evicting import evict
from kv_pool.core.pool_state import NOTHING, PoolState
from kv_pool.core.taking import notify_watchers_of, take_listed
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import BlockId


def add_last(pool: PoolState, num_blocks: int) -> None:
    """Implement `BlockPool.add_blocks`."""
    if not isinstance(num_blocks, int):
        num_blocks = as_int("num_blocks", num_blocks)
    if num_blocks < 0:
        raise InvalidArgumentError(f"the pool cannot grow by {num_blocks} blocks; see remove_last_blocks()")
    if num_blocks == 0:
        return
    if pool._unfinished != NOTHING:
        pool._recover()
    queue = pool.free_block_queue
    num_before = pool.num_gpu_blocks
    first, end = num_before, num_before + num_blocks
    added = [KVCacheBlock(cast(BlockId, block_id)) for block_id in range(first, end)]
    last = added[0]
    for block in added:
        block.owner = pool.block_owner
        if block is not last:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
    blocks = pool.blocks + tuple(added)
    queue.check_linked()
    try:
        queue.splice(added[0], last, num_blocks, None, None, 0)
        pool.num_gpu_blocks += num_blocks
        if pool._num_guessable:
            pool._num_guessable = pool.num_gpu_blocks
        pool.blocks = blocks
    except BaseException:
        for block in added:  # unlink them from each other, so that they can be collected
            block.prev_free_block = None
            block.next_free_block = None
        raise
    if pool._policy_host is not None:
        pool._policy_host.note_resized()
    if pool._live_curve is not None:
        pool._live_curve.note_resized(pool.num_gpu_blocks - 1)


def remove_last(pool: PoolState, num_blocks: int) -> None:
    """Implement `BlockPool.remove_last_blocks`."""
    if not isinstance(num_blocks, int):
        num_blocks = as_int("num_blocks", num_blocks)
    if num_blocks < 0:
        raise InvalidArgumentError(f"the pool cannot shrink by {num_blocks} blocks; see add_blocks()")
    if num_blocks == 0:
        return
    if pool._unfinished != NOTHING:
        pool._recover()
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
    blocks = pool.blocks[:num_left]
    if pool.reuse_watchers:
        notify_watchers_of(pool, removed)
    for block in removed:
        if pool.metrics_collector is not None:
            pool.metrics_collector.on_block_evicted(block)
        evict(pool, block)
    gone: list[KVCacheBlock] = []
    try:
        take_listed(pool, removed, gone, False)
    finally:
        if gone:
            pool._last_found = blocks[0]
            pool.blocks = blocks
            pool.num_gpu_blocks = num_left
            if pool._num_guessable:
                pool._num_guessable = num_left
    for block in removed:
        block.ref_cnt = 0
    if pool._band_policy is not None:
        pool._band_policy.note_removed(removed)
    if pool._live_curve is not None:
        pool._live_curve.note_resized(pool.num_gpu_blocks - 1)
