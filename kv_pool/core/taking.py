"""Taking blocks that are listed; what happens to the content of blocks that are taken."""

from mypy_extensions import i64

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_checks import raise_not_takeable, raise_typed
from kv_pool.core.evicting import evict, evict_all
from kv_pool.core.free_queue import BAND_END
from kv_pool.core.observer import BlockObserver, ColderTiers
from kv_pool.core.pool_state import (
    CLEARING_LINKS_OF_TAKEN,
    NOTHING,
    UNDO_TAKING_FIRST,
    UNDO_TAKING_LISTED,
    PoolState,
    finish,
)


def take_listed(
    pool: PoolState,
    listed: list[KVCacheBlock],
    onto: list[KVCacheBlock] | None,
    is_reuse: bool = True,
) -> None:
    """See `BlockPool.take_blocks`; appends the blocks to `onto` as well.

    Args:
        is_reuse: False notifies no watcher and evicts nothing.
    """
    if pool._unfinished != NOTHING:
        pool._recover()
    if is_reuse and pool.reuse_watchers:
        check_takeable(pool, listed)
        tell_watchers_of(pool, listed)
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
            # The block keeps its own links until all went well: they say where it belongs.
            before.next_free_block = after
            after.prev_free_block = before
            block.ref_cnt = 1  # which a second mention of the block comes upon
            num_done += 1
        if is_reuse and (any_cached or pool.metrics_collector is not None):
            give_content_away(pool, listed, any_cached)
        if onto is not None:
            onto += listed
        queue.num_free_blocks -= num_listed
        is_taken = True
        for block in listed:
            if block.next_free_block is not None:
                block.prev_free_block = None
                block.next_free_block = None
                block.generation += 1
    except BaseException as error:
        pool._unfinished_blocks = listed
        pool._unfinished_count = num_done
        pool._unfinished = CLEARING_LINKS_OF_TAKEN if is_taken else UNDO_TAKING_LISTED
        pool._recover()
        raise_typed(error, listed, "take_blocks()")


def check_takeable(pool: PoolState, listed: list[KVCacheBlock]) -> None:
    """Raise what `take_listed` would. Only looks."""
    seen: set[int] = set()
    try:
        for block in listed:
            if block.owner is not pool.block_owner or block.is_null or block.ref_cnt != 0:
                raise_not_takeable(block, pool.block_owner)
            if block.next_free_block is None or block.block_id in seen:
                raise_not_takeable(block, pool.block_owner)
            seen.add(block.block_id)
    except Exception as error:
        raise_typed(error, listed, "take_blocks()")


def give_content_away(pool: PoolState, taken: list[KVCacheBlock], any_cached: bool) -> None:
    """Notify tiers and the observer that these blocks are taken, and evict what they hold."""
    if any_cached and pool.colder_tiers is not None:
        tell_tiers(pool, taken, pool.colder_tiers)
    if pool.metrics_collector is not None:
        tell_observer(pool, taken, pool.metrics_collector)
    elif any_cached and pool.enable_caching:
        evict_all(pool, taken)


def tell_observer(pool: PoolState, taken: list[KVCacheBlock], observer: BlockObserver) -> None:
    """Evict and hand out these blocks one after the other, as the observer expects it."""
    for block in taken:
        block.ref_cnt = 0
    for block in taken:
        if pool.enable_caching:
            observer.on_block_evicted(block)
            evict(pool, block)
        block.ref_cnt = 1
        observer.on_block_allocated(block)


def tell_tiers(pool: PoolState, taken: list[KVCacheBlock], tiers: ColderTiers) -> None:
    """Say which of these blocks lose content that could be hit; they still have their keys."""
    if pool.enable_caching:
        tiers.on_blocks_reused([block for block in taken if block.key is not None])


def tell_watchers_of_next(pool: PoolState, num_blocks: int) -> None:
    """Call the reuse watchers of the next `num_blocks` free blocks, in order, and forget them.

    They are off the queue meanwhile, and back at its front even if a watcher raises.
    """
    queue = pool.free_block_queue
    listed: list[KVCacheBlock] = []
    block = queue.fake_free_list_head.next_free_block
    while block is not None and block is not queue.fake_free_list_tail and len(listed) < num_blocks:
        if block.ref_cnt != BAND_END:
            listed.append(block)
        block = block.next_free_block
    tell_watchers_of(pool, listed)


def tell_watchers_of(pool: PoolState, blocks: list[KVCacheBlock]) -> None:
    """Call the reuse watchers of these free blocks, off the queue meanwhile, then at its front."""
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
        tell_watchers(pool, blocks)
    finally:
        if not is_off and off and off[-1].next_free_block is not None:
            del off[-1]  # appended, and not unlinked yet
        pool._unfinished_total = queue.num_free_blocks + num_blocks if is_off else num_free
        pool._unfinished_blocks = off
        pool._unfinished_count = -1
        pool._unfinished = UNDO_TAKING_FIRST
        finish(pool)


def tell_watchers(pool: PoolState, blocks: list[KVCacheBlock]) -> None:
    """Call the reuse watchers of these blocks, in order, and forget them."""
    for block in blocks:
        watcher = pool.reuse_watchers.get(block.block_id)
        if watcher is not None:
            del pool.reuse_watchers[block.block_id]
            watcher.on_reuse(block)
