"""`repair_pool`: make a pool whole after an interrupted call. `forget_all`: empty its prefix cache."""

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.evicting import count_cause
from kv_pool.core.hash_map import BlockHashToBlockMap
from kv_pool.core.pool_state import PoolState, set_blocks
from kv_pool.core.taking import notify_watchers
from kv_pool.errors import InvalidBlockError
from kv_pool.ids import BlockId


def repair_pool(pool: PoolState, referenced: list[KVCacheBlock]) -> None:
    """Implement `BlockPool.repair`. Each step can be repeated."""
    for block in referenced:
        if block.owner is not pool.block_owner:
            raise InvalidBlockError(f"block {block.block_id} is not one of this pool's; it cannot be kept")
    pool.is_changing = True
    pool.holds.begin_repair()
    for part in pool.parts:
        part.begin_repair()
    counts = pool.holds.count_references()
    for block in referenced:
        if not block.is_null:
            counts[block] = counts.get(block, 0) + 1
    for position, block in enumerate(pool.blocks):
        block.block_id = BlockId(position)
        block.ref_cnt = counts.get(block, 0)
    free = list_free(pool)
    for block in pool.blocks:
        block.prev_free_block = None
        block.next_free_block = None
    pool.eviction_order.relink(free)
    set_blocks(pool, pool.blocks)
    forget_all(pool, "repair")
    for part in pool.parts:
        part.rebuild_from(pool)
    pool.num_repairs += 1
    pool.is_changing = False
    notify_watchers(pool, [block for block in free if block.block_id in pool.reuse_watchers])


def list_free(pool: PoolState) -> list[KVCacheBlock]:
    """Return the blocks without references: those that the queue still links in its order, then the others.

    The queue's links may be broken at any place, so it is read from both ends.
    """
    queue = pool.free_block_queue
    found: dict[KVCacheBlock, None] = {}
    block = queue.fake_free_list_head.next_free_block
    while block is not None and block is not queue.fake_free_list_tail and block not in found:
        found[block] = None
        block = block.next_free_block
    backwards: dict[KVCacheBlock, None] = {}
    block = queue.fake_free_list_tail.prev_free_block
    while block is not None and block not in found and block not in backwards:
        backwards[block] = None
        block = block.prev_free_block
    # Some of them may be markers, or blocks that the pool was about to get.
    ours = dict.fromkeys([block for block in pool.blocks if block.ref_cnt == 0 and not block.is_null])
    order = dict.fromkeys([block for block in (*found, *reversed(backwards)) if block in ours])
    return list(order | ours)


def forget_all(pool: PoolState, cause: str = "reset") -> None:
    """Empty the prefix cache, as part of a larger call: one `AllBlocksCleared`. See `count_cause`."""
    if pool.lower_tiers is not None:
        pool.lower_tiers.on_cache_reset()
    pool.cached_block_hash_to_block = BlockHashToBlockMap()
    num_keys = sum([len(keys) for keys in pool.cached_block_hashes_by_block.values()])
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        if block.key is not None:
            num_keys += 1
        block.reset_hash()
    pool.num_evictions += num_keys
    count_cause(pool, cause, pool.num_evictions - num_keys)
    pool.eviction_order.note_all_empty()
    for part in pool.parts:
        part.note_reset()
    if pool.enable_kv_cache_events:
        pool.kv_event_queue.append(pool.cleared_type())
