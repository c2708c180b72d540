"""Evict blocks: remove their keys, count them and emit events."""

from typing import Any, cast

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import get_block_hash, get_group_id, make_external_block_hashes
from kv_pool.core.pool_state import PoolState
from kv_pool.errors import CorruptedPoolError
from kv_pool.ids import BlockHashWithGroupId, BlockId


def evict(pool: PoolState, block: KVCacheBlock) -> bool:
    """Remove the block's keys. Each key that was in the prefix map is counted and gets an event.

    Returns:
        True if any key was in the prefix map.
    Raises:
        Any interrupt. The keys that are removed by then are counted and have events.
    """
    num_before = pool.num_evictions
    if not pool.enable_kv_cache_events:
        drop_keys(pool, block, None)
    elif block.key is not None or pool.cached_block_hashes_by_block:
        try:
            drop_keys(pool, block, pool._unannounced)
        finally:
            if pool._unannounced:
                announce_removed(pool)
    return pool.num_evictions > num_before


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
    """Evict each of these blocks, in order."""
    cache = pool.cached_block_hash_to_block
    entries = cache._cache
    # Fast path: if the map's count and the block's flag guarantee a bare entry, delete it without a lookup.
    is_sure = cache._num_keys == len(entries) and not pool.cached_block_hashes_by_block
    announces = pool.enable_kv_cache_events
    keys = pool._unannounced
    num_deleted = 0
    block = pool.blocks[0]
    try:
        for block in blocks:
            if is_sure and block._next_cached_id >= 0:
                key = cast(BlockHashWithGroupId, block.key)
                if announces:
                    keys.append(key)
                block.key = None
                block.num_key_tokens = -1
                block._next_cached_id = -1
                try:
                    del entries[key]
                except KeyError:  # a caller has edited the map
                    if announces:
                        del keys[-1]
                    continue
                num_deleted += 1
            elif block.key is not None or pool.cached_block_hashes_by_block:
                drop_keys(pool, block, keys if announces else None)
    finally:
        if keys and block.key is keys[-1]:  # interrupted before it was dropped
            del keys[-1]
        cache._num_keys -= num_deleted
        pool.num_evictions += num_deleted
        if keys:
            announce_removed(pool)


def drop_keys(pool: PoolState, block: KVCacheBlock, dropped: list[BlockHashWithGroupId] | None) -> None:
    """Remove all keys of the block, primary first, and count those that were in the prefix map.

    Args:
        dropped: collects the counted keys, if given.

    Works key by key: after an interrupt, each key is either removed everywhere or still in place.
    """
    cache = pool.cached_block_hash_to_block
    entries = cache._cache
    secondary = pool.cached_block_hashes_by_block
    while True:
        others: dict[BlockHashWithGroupId, None] | None = None
        following: BlockHashWithGroupId | None = None
        block_id = block.block_id
        if secondary:
            others = secondary.get(block_id)
            if others is not None:
                following = next(iter(others), None)
        key = cast(BlockHashWithGroupId | None, block.key)
        if key is None and others is None:
            return
        found: Any = None if key is None else entries.get(key)
        copies: dict[BlockId, KVCacheBlock] | None = None
        is_known = False
        if isinstance(found, KVCacheBlock):
            is_known = found.block_id == block.block_id
        elif isinstance(found, dict):
            is_known = block.block_id in found
            if is_known and len(found) > 1:
                copies = found
        elif found is not None:
            raise CorruptedPoolError(f"the prefix map holds a {type(found).__name__} for {key!r}")
        if is_known and key is not None:
            if dropped is not None:
                dropped += [key]
            if copies is None:
                del entries[key]
                cache._num_keys -= 1
            else:
                del copies[block.block_id]
            pool.num_evictions += 1
        # The next key becomes the primary key; the next iteration removes it.
        block.key = following
        block.num_key_tokens = -1
        block._next_cached_id = -1
        if others is not None:
            if following is not None:
                del others[following]
            if not others:
                del secondary[block.block_id]


def announce_removed(pool: PoolState) -> None:
    """Append `BlockRemoved` events for the keys in `_unannounced`, and clear it.

    One event per key; with `dense_events`, one per run of keys of one group in which no hash repeats.
    """
    keys = pool._unannounced
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
    made: list[Any] = []
    if pool.dense_events:
        join_removed(pool, keys, hashes, made)
    else:
        for key, block_hash in zip(keys, hashes):  # noqa: B905 (mypyc makes a loop of this only)
            if not key.endswith(suffix):
                suffix = key[-4:]
                group_id = get_group_id(key)
            made.append(make_removed([block_hash], medium, group_id))
    nothing: list[BlockHashWithGroupId] = []
    events += made
    pool._unannounced = nothing


def join_removed(
    pool: PoolState, keys: list[BlockHashWithGroupId], hashes: list[Any], made: list[Any]
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
