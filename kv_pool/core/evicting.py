"""Evict blocks: remove their keys, count them and emit events."""

from typing import Any, cast

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import get_block_hash, get_group_id, make_external_block_hashes
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.pool_state import PoolState
from kv_pool.ids import BlockHashWithGroupId


def evict(pool: PoolState, block: KVCacheBlock) -> bool:
    """Remove the block's keys. Each key that was in the prefix map is counted and gets an event.

    Returns:
        True if any key was in the prefix map.
    """
    if block.key is None and not pool.cached_block_hashes_by_block:
        return False
    was_changing = pool.is_changing
    pool.is_changing = True
    num_before = pool.num_evictions
    evict_all(pool, [block])
    pool.is_changing = was_changing
    return pool.num_evictions > num_before


def count_cause(pool: PoolState, cause: str, num_before: int) -> None:
    """Count the evictions since `num_before` under a cause.

    reset       of the prefix cache
    evict       by a caller of `evict_blocks`
    invalid     content that was reported to be bad, and what was computed from it
    rewrite     content that a request or a compaction overwrites, or that later content supersedes
    move        of keys to another block
    shrink      of the pool
    repair      after an interrupted call
    """
    counts = pool.evictions_by_cause
    counts[cause] = counts.get(cause, 0) + pool.num_evictions - num_before


def evict_invalid(pool: PoolState, blocks: list[KVCacheBlock], cause: str = "rewrite") -> None:
    """Implement `BlockPool.evict_blocks`. For the cause, see `count_cause`."""
    num_before = pool.num_evictions
    was_changing = pool.is_changing
    pool.is_changing = True
    for block in blocks:
        key = block.key
        own_hash = key[:-4] if isinstance(key, bytes) else find_own_hash(block)
        drop_content(pool, block)
        if own_hash is not None:
            note_own_hash(block, own_hash)
    count_cause(pool, cause, num_before)
    pool.is_changing = was_changing


def evict_overwritten(pool: PoolState, blocks: list[KVCacheBlock]) -> None:
    """Evict free blocks whose content other bytes replace, as part of a larger call."""
    num_before = pool.num_evictions
    for block in blocks:
        if block.key is None:
            block.generation += 1  # its content may be known by a hash of its own
        else:
            drop_content(pool, block)
    count_cause(pool, "rewrite", num_before)


def drop_content(pool: PoolState, block: KVCacheBlock) -> None:
    """Evict a block and end its generation, as part of a larger call. Its references do not change."""
    block.generation += 1
    if pool.metrics_collector is not None:
        pool.metrics_collector.on_block_evicted(block)
    evict(pool, block)
    if block.block_id not in pool.reuse_watchers:
        for part in pool.parts:
            part.note_emptied(block.block_id)


def note_own_hash(block: KVCacheBlock, block_hash: bytes) -> None:
    """Note on a block without a key the hash that its content has, until the block is reused."""
    block.parent = block_hash
    block.num_key_tokens = -2 - block.generation


def find_own_hash(block: KVCacheBlock) -> Any:
    """Return the hash that `note_own_hash` has noted on the block, as bytes; None if there is none."""
    if block.key is None and block.num_key_tokens == -2 - block.generation:
        return block.parent
    return None


def evict_all(pool: PoolState, blocks: list[KVCacheBlock]) -> None:
    """Evict each of these blocks, in order, as part of a larger change."""
    cache = pool.cached_block_hash_to_block
    entries = cache._cache
    # Fast path: if the map's count and the block's flag guarantee a bare entry, delete it without a lookup.
    is_sure = cache._num_keys == len(entries) and not pool.cached_block_hashes_by_block
    announces = pool.enable_kv_cache_events
    keys: list[BlockHashWithGroupId] = []
    num_deleted = 0
    for block in blocks:
        if is_sure and block._next_cached_id >= 0:
            key = cast(BlockHashWithGroupId, block.key)
            block.key = None
            block.num_key_tokens = -1
            block._next_cached_id = -1
            try:
                del entries[key]
            except KeyError:  # a caller has edited the map
                continue
            if announces:
                keys.append(key)
            num_deleted += 1
        elif block.key is not None or pool.cached_block_hashes_by_block:
            drop_keys(pool, block, keys)
    cache._num_keys -= num_deleted
    pool.num_evictions += num_deleted
    if keys and announces:
        announce_removed(pool, keys)


def drop_keys(pool: PoolState, block: KVCacheBlock, dropped: list[BlockHashWithGroupId]) -> None:
    """Remove all keys of the block, primary first, and count those that were in the prefix map.

    Args:
        dropped: collects the counted keys.
    """
    keys: list[BlockHashWithGroupId] = []
    if block.key is not None:
        keys.append(block.key)
    if pool.cached_block_hashes_by_block:
        keys += pool.cached_block_hashes_by_block.pop(block.block_id, {})
    if not keys:
        return
    cache = pool.cached_block_hash_to_block
    for key in keys:
        if cache.pop(key, block.block_id) is not None:
            dropped.append(key)
            pool.num_evictions += 1
    block.reset_hash()


def announce_removed(pool: PoolState, keys: list[BlockHashWithGroupId]) -> None:
    """Append `BlockRemoved` events for these keys, which are at least one.

    One event per key; with `dense_events`, one per run of keys of one group in which no hash repeats.
    """
    events = pool.kv_event_queue
    medium = pool.medium
    make_removed = pool.removed_type
    hashes: list[Any] = (
        cast(Any, make_external_block_hashes(keys, 4))
        if pool.use_int_block_hashes
        else [get_block_hash(key) for key in keys]
    )
    suffix = keys[0][-4:]
    group_id = get_group_id(keys[0])
    if pool.dense_events:
        join_removed(pool, keys, hashes, events)
    else:
        for key, block_hash in zip(keys, hashes):  # noqa: B905 (mypyc makes a loop of this only)
            if not key.endswith(suffix):
                suffix = key[-4:]
                group_id = get_group_id(key)
            events.append(make_removed([block_hash], medium, group_id))


def join_removed(
    pool: PoolState, keys: list[BlockHashWithGroupId], hashes: list[Any], made: list[KVCacheEvent]
) -> None:
    """Append one `BlockRemoved` per run of keys of one group in which no hash repeats."""
    make_removed = pool.removed_type
    suffix = keys[0][-4:]
    group_id = get_group_id(keys[0])
    seen: dict[Any, None] = {}
    for key, block_hash in zip(keys, hashes):  # noqa: B905 (mypyc makes a loop of this only)
        if block_hash in seen or not key.endswith(suffix):
            made.append(make_removed(list(seen), pool.medium, group_id))
            seen = {}
            suffix = key[-4:]
            group_id = get_group_id(key)
        seen[block_hash] = None
    made.append(make_removed(list(seen), pool.medium, group_id))
