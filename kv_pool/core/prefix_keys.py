"""Add and remove keys, on the blocks and in the prefix map together. Only removals emit events."""

from typing import Any

from mypy_extensions import i32, i64

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import group_suffix
from kv_pool.core.evicting import evict
from kv_pool.core.pool_state import PoolState
from kv_pool.errors import CorruptedPoolError, InvalidBlockError
from kv_pool.ids import BlockHash, BlockHashWithGroupId, GroupId


def add_keys(
    pool: PoolState,
    before: KVCacheBlock,
    parent: bytes,
    blocks: list[KVCacheBlock],
    hashes: list[BlockHash],
    suffix: bytes,
    num_tokens: i32,
    block_size: i32,
) -> None:
    """Key each block that is not null by its hash and its group's suffix. Only removals emit events.

    Args:
        before: the block before the first one in the sequence, or the null block.
        parent: the key of the prefix before the first block; b"" for an empty prefix.
        num_tokens: number of tokens before the first block.
    """
    cache = pool.cached_block_hash_to_block
    entries = cache._cache
    owner = pool.block_owner
    num_added: i64 = 0
    num_keys: i64 = len(entries)
    skipped: BlockHash | None = None
    for block, block_hash in zip(blocks, hashes):  # noqa: B905 (mypyc makes a loop of this only)
        num_tokens += block_size
        if block.is_null:
            skipped = block_hash
            continue
        if block.key is not None:
            evict(pool, block)
            num_keys = len(entries)
        if skipped is not None:
            parent = skipped + suffix
            skipped = None
        key = BlockHashWithGroupId(block_hash + suffix)
        if entries.setdefault(key, block) is block and len(entries) > num_keys:
            num_keys += 1
            num_added += 1
            block._next_cached_id = 0
        elif cache.contain(key, block.block_id):
            parent = key
            continue
        else:
            cache.insert(key, block)
        block.parent = parent
        parent = key
        block.key = key
        block.num_key_tokens = num_tokens
        if block.retention_id > 0:
            block.retention_id = -block.retention_id
        if block.owner is owner:
            if before._next_cached_id >= 0:
                before._next_cached_id = block.block_id
            before = block
    cache._num_keys += num_added


def insert_key(
    pool: PoolState,
    key: BlockHashWithGroupId,
    block: KVCacheBlock,
    num_tokens: int | None,
    parent: bytes | None = None,
) -> None:
    """Add a key that the block does not have yet, as its primary or a secondary key.

    Args:
        parent: see `KVCacheBlock.parent`; used for the primary key only.
    """
    cache = pool.cached_block_hash_to_block
    entries = cache._cache
    secondary = pool.cached_block_hashes_by_block
    block_id = block.block_id
    is_primary = block.key is None
    if is_primary and block.num_key_tokens >= 0:
        raise InvalidBlockError(f"block {block_id} has a token count without a hash; call reset_hash()")
    found: Any = entries.get(key)
    if found is not None and not isinstance(found, (KVCacheBlock, dict)):
        raise CorruptedPoolError(f"the prefix map holds a {type(found).__name__} for {key!r}")
    was_changing = pool.is_changing
    pool.is_changing = True
    if not is_primary:
        secondary.setdefault(block_id, {})[key] = None
    if found is None:
        entries[key] = block
        cache._num_keys += 1
    elif isinstance(found, KVCacheBlock):
        entries[key] = {found.block_id: found, block_id: block}
        found._next_cached_id = -1
        block._next_cached_id = -1
    else:
        found[block_id] = block
        block._next_cached_id = -1
    if is_primary:
        block.key = key
        block.num_key_tokens = -1 if num_tokens is None else num_tokens
        block.parent = parent
        block._next_cached_id = -1
        if block.retention_id > 0:
            block.retention_id = -block.retention_id
    pool.is_changing = was_changing


def are_sole_holders(
    pool: PoolState, blocks: list[KVCacheBlock], last_hash: BlockHash, block_size: int, group_id: GroupId
) -> bool:
    """Return True if `find_cached_prefix` is certain to find these blocks of a table.

    False does not mean the opposite: the prefix map may still find them. O(len(blocks)), without a lookup
    in the prefix map.

    Args:
        blocks: the first blocks of the table, at least one; they were cached as such.
        last_hash: hash of the last block; it covers the blocks before it.
    """
    cache = pool.cached_block_hash_to_block
    if pool.cached_block_hashes_by_block or cache._num_keys != len(cache._cache):
        return False
    step: i32 = block_size
    num_tokens: i32 = 0
    for block in blocks:
        num_tokens += step
        if block._next_cached_id < 0 or block.num_key_tokens != num_tokens:
            return False
    is_last: bool = blocks[-1].key == last_hash + group_suffix(group_id)
    return is_last
