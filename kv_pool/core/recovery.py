"""`recover`: complete or undo an interrupted call of a pool."""

from kv_pool.core.caching import add_key
from kv_pool.core.evicting import announce_removed, drop_keys, evict
from kv_pool.core.hash_map import BlockHashToBlockMap
from kv_pool.core.id_swap import put_ids
from kv_pool.core.pool_state import (
    CLEARING_LINKS,
    CLEARING_LINKS_OF_TAKEN,
    EVICTING,
    MOVING_KEYS,
    NOTHING,
    RESETTING,
    SWAPPING_IDS,
    UNDO_CACHING,
    UNDO_FREEING,
    UNDO_TAKING_FIRST,
    UNDO_TAKING_LISTED,
    UNDO_TOUCHING,
    WATCHING,
    PoolState,
)
from kv_pool.core.prefix_keys import remove_added_keys


def recover(pool: PoolState) -> None:
    """Complete or undo the operation noted in `_unfinished`. May itself be interrupted and called again."""
    if pool._unannounced:
        announce_removed(pool)  # before any other event
    queue = pool.free_block_queue
    head = queue.fake_free_list_head
    todo = pool._unfinished
    blocks = pool._unfinished_blocks
    if todo == UNDO_TAKING_FIRST:
        if pool._unfinished_count < 0:
            pool._unfinished_count = len(blocks)
        ends = pool._unfinished_ends
        while pool._unfinished_count > 0:
            # Last block first, each to the front of the queue or of its band.
            block = blocks[pool._unfinished_count - 1]
            while ends and ends[-1][0] >= pool._unfinished_count:
                del ends[-1]
            front = ends[-1][1] if ends else head
            after = front.next_free_block
            assert after is not None
            block.ref_cnt = 0
            block.prev_free_block = front
            block.next_free_block = after
            front.next_free_block = block
            after.prev_free_block = block
            pool._unfinished_count -= 1
        queue.num_free_blocks = pool._unfinished_total
        pool._unfinished_ends = []
    elif todo in (UNDO_TOUCHING, UNDO_TAKING_LISTED):
        while pool._unfinished_count > 0:
            # Last block first, each back between the neighbours that its own links still name.
            block = blocks[pool._unfinished_count - 1]
            if not block.is_null:
                block.ref_cnt = block.ref_cnt - 1 if todo == UNDO_TOUCHING else 0
                if block.ref_cnt == 0:
                    before = block.prev_free_block
                    after = block.next_free_block
                    assert before is not None
                    assert after is not None
                    before.next_free_block = block
                    after.prev_free_block = block
            pool._unfinished_count -= 1
    elif todo in (CLEARING_LINKS, CLEARING_LINKS_OF_TAKEN):
        for block in blocks:
            if block.next_free_block is not None:
                block.prev_free_block = None
                block.next_free_block = None
                if todo == CLEARING_LINKS_OF_TAKEN:
                    block.generation += 1
    elif todo == UNDO_FREEING:
        owner = pool.block_owner
        while pool._unfinished_count > 0:
            block = blocks[pool._unfinished_count - 1]
            if not block.is_null and (block.owner is owner or block.owner is None):
                if block.ref_cnt == 0:
                    block.prev_free_block = None
                    block.next_free_block = None
                block.ref_cnt += 1
            pool._unfinished_count -= 1
    elif todo == WATCHING:
        watcher = pool._unfinished_watcher
        assert watcher is not None
        for block in blocks:
            pool.reuse_watchers[block.block_id] = watcher
    elif todo == RESETTING:
        if pool.lower_tiers is not None:
            pool.lower_tiers.on_cache_reset()
        pool.cached_block_hash_to_block = BlockHashToBlockMap()
        pool.cached_block_hashes_by_block.clear()
        pool.reuse_watchers.clear()  # the remaining ones watch bare blocks
        for block in pool.blocks:
            if block.key is not None:
                block.key = None
                block.num_key_tokens = -1
                block._next_cached_id = -1
        pool.eviction_order.note_all_empty()
        if pool._band_policy is not None:
            pool._band_policy.note_reset()
        if pool._live_curve is not None:
            pool._live_curve.note_reset()
        cleared = [pool.cleared_type()] if pool.enable_kv_cache_events else []
        events = pool.kv_event_queue
        events += cleared
        pool.num_evictions = pool._unfinished_total
        pool._unfinished = NOTHING
    elif todo == SWAPPING_IDS:
        put_ids(pool)
    elif todo == UNDO_CACHING:
        cache = pool.cached_block_hash_to_block
        remove_added_keys(pool, pool._unfinished_blocks, pool._unfinished_hashes, pool._unfinished_suffix)
        if pool._is_map_sure:
            cache._num_keys = len(cache._cache)
    elif todo == EVICTING:
        for block in pool._unfinished_blocks:
            block.generation += 1  # possibly a second time, which is harmless
            evict(pool, block)
    elif todo == MOVING_KEYS:
        source, target = pool._unfinished_blocks
        drop_keys(pool, source, pool._moved_keys)
        for key in pool._moved_keys:
            add_key(pool, key, target, pool._moved_num_tokens)
    pool._unfinished = NOTHING
