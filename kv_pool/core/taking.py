"""Take given free blocks, and evict the content of blocks that are taken."""

from mypy_extensions import i64

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_checks import raise_not_takeable, raise_typed
from kv_pool.core.evicting import evict, evict_all
from kv_pool.core.free_queue import BAND_END
from kv_pool.core.observer import BlockObserver, LowerTiers
from kv_pool.core.pool_state import (
    CLEARING_LINKS_OF_TAKEN,
    NOTHING,
    UNDO_TAKING_FIRST,
    UNDO_TAKING_LISTED,
    PoolState,
    finish,
)
from kv_pool.ids import BlockId


def take_listed(
    pool: PoolState,
    listed: list[KVCacheBlock],
    onto: list[KVCacheBlock] | None,
    is_reuse: bool = True,
) -> None:
    """Implement `BlockPool.take_blocks`, and append the blocks to `onto` if given.

    Args:
        is_reuse: if False, notify no watcher and evict nothing.
    """
    if pool._unfinished != NOTHING:
        pool._recover()
    if is_reuse and pool.reuse_watchers:
        check_takeable(pool, listed)
        notify_watchers_of(pool, listed)
    owner = pool.block_owner
    queue = pool.free_block_queue
    num_listed = len(listed)
    any_cached = len(pool.cached_block_hashes_by_block) > 0
    num_done: i64 = 0
    is_taken = False
    try:
        for block in listed:
            before = block.prev_free_block
            after = block.next_free_block
            if block.owner is not owner or block.is_null or block.ref_cnt != 0:
                raise_not_takeable(block, owner)
            if before is None or after is None:
                raise_not_takeable(block, owner)
            if block.key is not None:
                any_cached = True
            # The block keeps its own links until all blocks are taken, so that an undo finds its position.
            before.next_free_block = after
            after.prev_free_block = before
            block.ref_cnt = 1  # detects a block that is listed twice
            num_done += 1
        if is_reuse and (any_cached or pool.metrics_collector is not None):
            evict_taken(pool, listed, any_cached)
        if onto is not None:
            onto += listed
        queue.num_free_blocks -= num_listed
        is_taken = True
        for block in listed:
            if block.next_free_block is not None:
                block.prev_free_block = None
                block.next_free_block = None
                block.generation += 1
        if pool._policy_host is not None:
            pool._policy_host.note_taken(listed)
    except BaseException as error:
        if is_taken and pool._policy_host is not None:
            pool._policy_host.is_stale = True
        pool._unfinished_blocks = listed
        pool._unfinished_count = num_done
        pool._unfinished = CLEARING_LINKS_OF_TAKEN if is_taken else UNDO_TAKING_LISTED
        pool._recover()
        raise_typed(error, listed, "take_blocks()")


def check_takeable(pool: PoolState, listed: list[KVCacheBlock]) -> None:
    """Raise the error that `take_listed` would raise. Changes nothing."""
    seen: set[BlockId] = set()
    try:
        for block in listed:
            if block.owner is not pool.block_owner or block.is_null or block.ref_cnt != 0:
                raise_not_takeable(block, pool.block_owner)
            if block.next_free_block is None or block.block_id in seen:
                raise_not_takeable(block, pool.block_owner)
            seen.add(block.block_id)
    except Exception as error:
        raise_typed(error, listed, "take_blocks()")


def evict_taken(pool: PoolState, taken: list[KVCacheBlock], any_cached: bool) -> None:
    """Notify the tiers and the observer that these blocks are taken, and evict their content."""
    if any_cached and pool.lower_tiers is not None:
        notify_tiers(pool, taken, pool.lower_tiers)
    if pool.metrics_collector is not None:
        notify_observer(pool, taken, pool.metrics_collector)
    elif any_cached and pool.enable_caching:
        evict_all(pool, taken)


def notify_observer(pool: PoolState, taken: list[KVCacheBlock], observer: BlockObserver) -> None:
    """Evict and allocate these blocks one by one, in the call order that the observer expects."""
    for block in taken:
        block.ref_cnt = 0
    for block in taken:
        if pool.enable_caching:
            observer.on_block_evicted(block)
            evict(pool, block)
        block.ref_cnt = 1
        observer.on_block_allocated(block)


def notify_tiers(pool: PoolState, taken: list[KVCacheBlock], tiers: LowerTiers) -> None:
    """Notify the tiers of the cached blocks among these. The blocks still have their keys."""
    if pool.enable_caching:
        tiers.on_blocks_reused([block for block in taken if block.key is not None])


def notify_watchers_of_next(pool: PoolState, num_blocks: int) -> None:
    """Call the reuse watchers of the next `num_blocks` free blocks, in order, and remove the watchers.

    During the calls the blocks are not in the queue. Afterwards they are at its front, even if a watcher
    raises.
    """
    queue = pool.free_block_queue
    listed: list[KVCacheBlock] = []
    block = queue.fake_free_list_head.next_free_block
    while block is not None and block is not queue.fake_free_list_tail and len(listed) < num_blocks:
        if block.ref_cnt != BAND_END:
            listed.append(block)
        block = block.next_free_block
    notify_watchers_of(pool, listed)


def notify_watchers_of(pool: PoolState, blocks: list[KVCacheBlock]) -> None:
    """Call the reuse watchers of these free blocks, in order, and remove the watchers.

    During the calls the blocks are not in the queue. Afterwards they are at its front, even if a watcher
    raises.
    """
    queue = pool.free_block_queue
    num_free = queue.num_free_blocks
    num_blocks = len(blocks)
    off: list[KVCacheBlock] = []
    is_off = False
    try:
        for block in blocks:
            off.append(block)
            before = block.prev_free_block
            after = block.next_free_block
            assert before is not None
            assert after is not None
            before.next_free_block = after
            after.prev_free_block = before
            block.prev_free_block = None
            block.next_free_block = None
        queue.num_free_blocks = num_free - num_blocks
        is_off = True
        notify_watchers(pool, blocks)
    finally:
        if not is_off and off and off[-1].next_free_block is not None:
            del off[-1]  # appended but not yet unlinked
        pool._unfinished_total = queue.num_free_blocks + num_blocks if is_off else num_free
        pool._unfinished_blocks = off
        pool._unfinished_count = -1
        pool._unfinished = UNDO_TAKING_FIRST
        finish(pool)


def notify_watchers(pool: PoolState, blocks: list[KVCacheBlock]) -> None:
    """Call the reuse watchers of these blocks, in order, and remove the watchers."""
    for block in blocks:
        watcher = pool.reuse_watchers.get(block.block_id)
        if watcher is not None:
            del pool.reuse_watchers[block.block_id]
            watcher.on_reuse(block)
