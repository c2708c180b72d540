"""Make blocks findable by prefix: full blocks, partial blocks, and copies."""

from collections.abc import Sequence
from typing import Any

from mypy_extensions import i32, i64

from kv_pool.core.arguments import check_ours, raise_typed
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import get_block_hash, group_suffix, make_block_hash_with_group_id
from kv_pool.core.evicting import count_cause, drop_keys, evict, note_own_hash
from kv_pool.core.extra_keys import CacheableRequest, read_hashes
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.pool_state import PoolState
from kv_pool.core.stored_events import hashes_of, make_stored, make_stored_range
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, InvalidTypeError
from kv_pool.ids import BlockHash, BlockHashWithGroupId, GroupId


def cache_full(
    pool: PoolState,
    request: CacheableRequest,
    blocks: Sequence[KVCacheBlock],
    num_cached_blocks: int,
    num_full_blocks: int,
    block_size: int,
    kv_cache_group_id: GroupId,
    block_mask: Sequence[Any] | None,
) -> None:
    """Implement `BlockPool.cache_full_blocks`."""
    suffix = group_suffix(kv_cache_group_id)
    listed = blocks[num_cached_blocks:num_full_blocks]
    range_blocks: list[KVCacheBlock] = listed if isinstance(listed, list) else list(listed)
    num_blocks = num_full_blocks - num_cached_blocks
    if num_cached_blocks < 0 or len(range_blocks) != num_blocks:
        raise InvalidArgumentError(
            f"cannot cache blocks {num_cached_blocks}..{num_full_blocks} of a table of {len(blocks)} blocks"
        )
    if block_mask is not None and len(block_mask) != num_blocks:
        raise InvalidArgumentError(f"block_mask has {len(block_mask)} flags for {num_blocks} blocks")
    hashes = hashes_of(pool, request, num_cached_blocks, num_full_blocks, block_size)
    table_blocks = range_blocks
    owner = pool.block_owner
    num_tokens: i32 = num_cached_blocks * block_size
    step: i32 = block_size
    num_skipped: i64 = 0
    try:
        if block_mask is not None:
            null = pool.blocks[0]
            range_blocks = [table_blocks[place] if block_mask[place] else null for place in range(num_blocks)]
        for block, block_hash in zip(range_blocks, hashes):  # noqa: B905 (mypyc makes a loop of this only)
            num_tokens += step
            if block.is_null:
                num_skipped += 1
                continue
            if block.owner is not owner:
                check_ours(block, owner, "cache_full_blocks()")
            elif block.ref_cnt <= 0:
                raise InvalidBlockError(f"block {block.block_id} is free; only blocks in use can be cached")
            if block.key is not None and not 0 <= block.num_key_tokens < num_tokens:
                raise InvalidBlockError(
                    f"block {block.block_id} is already cached for {block.block_hash_num_tokens} tokens; "
                    f"only a hash over more tokens replaces that, and this one covers {num_tokens}"
                )
            if not isinstance(block_hash, bytes):
                raise InvalidTypeError(f"a block hash is a {type(block_hash).__name__}; hashes are bytes")
    except Exception as error:
        raise_typed(error, table_blocks, "cache_full_blocks()")

    # Build the events before anything changes, since that reads the request; append them after the
    # removals.
    new_events: list[KVCacheEvent] | None = None
    if pool.enable_kv_cache_events:
        stored: list[BlockHash | None] = [*hashes]
        for position in range(num_blocks if num_skipped else 0):
            if range_blocks[position].is_null:
                stored[position] = None
        new_events = make_stored_range(
            pool, request, stored, hashes, num_cached_blocks, block_size, kv_cache_group_id
        )
    before = pool.blocks[0]
    parent: bytes = b""
    if num_cached_blocks:
        before = blocks[num_cached_blocks - 1]
        num_covered: i32 = num_cached_blocks * block_size
        if before.num_key_tokens == num_covered and isinstance(before.key, bytes):
            parent = before.key
        else:
            (last,) = hashes_of(pool, request, num_cached_blocks - 1, num_cached_blocks, block_size)
            parent = last + suffix
    was_changing = pool.is_changing
    pool.is_changing = True
    if num_skipped and block_mask is not None:
        note_left_out(table_blocks, hashes, block_mask)
    num_before: i32 = num_cached_blocks * block_size
    add_keys(pool, before, parent, range_blocks, hashes, suffix, num_before, block_size)
    if new_events is not None:
        events = pool.kv_event_queue
        events += new_events
    if pool.lower_tiers is not None:
        pool.lower_tiers.on_blocks_cached(
            request, range_blocks, hashes, num_cached_blocks, block_size, kv_cache_group_id
        )
    for part in pool.parts:
        part.note_cached(request, blocks, range_blocks, num_cached_blocks, block_size, kv_cache_group_id)
    pool.is_changing = was_changing


def cache_partial(
    pool: PoolState,
    request: CacheableRequest,
    block: KVCacheBlock,
    num_tokens: int,
    kv_cache_group_id: GroupId,
    block_size: int,
    replace_existing_hashes: bool = False,
) -> BlockHashWithGroupId | None:
    """Implement `BlockPool.cache_partial_block`."""
    if block.is_null:
        return None
    check_ours(block, pool.block_owner, "cache_partial_block()")
    if block.ref_cnt <= 0 and block.owner is not None:
        raise InvalidBlockError(f"block {block.block_id} is free; only blocks in use can be cached")
    unit = pool.hash_block_size
    if block_size < 1 or block_size % unit:
        raise InvalidArgumentError(f"block_size {block_size} is not a multiple of hash_block_size {unit}")
    hashes = read_hashes(request)
    num_units = num_tokens // unit
    num_hashed = len(hashes)
    if num_tokens % unit or num_units < 1 or num_units > num_hashed:
        raise InvalidArgumentError(
            f"num_tokens is {num_tokens}; a partial entry covers a multiple of {unit} tokens, here "
            f"{unit} to {num_hashed * unit}"
        )
    block_hash = hashes[num_units - 1]
    key = make_block_hash_with_group_id(block_hash, kv_cache_group_id)
    covered = block.block_hash_num_tokens
    is_known = not replace_existing_hashes and (
        block.key == key or pool.cached_block_hash_to_block.contain(key, block.block_id)
    )
    if is_known:
        return key
    event: KVCacheEvent | None = None
    if pool.enable_kv_cache_events:
        parent = hashes[num_units - 2] if num_units > 1 else None
        event = make_stored(pool, request, [block_hash], parent, num_tokens - unit, unit, kv_cache_group_id)
    start = (num_tokens - 1) // block_size * block_size  # the block's first token
    before: bytes = b""
    if start:
        before = make_block_hash_with_group_id(hashes[start // unit - 1], kv_cache_group_id)
    was_changing = pool.is_changing
    pool.is_changing = True
    if replace_existing_hashes or (covered is not None and covered < num_tokens):
        evict(pool, block)
    add_key(pool, key, block, num_tokens, before)
    if event is not None:
        pool.kv_event_queue.append(event)
    pool.is_changing = was_changing
    return key


def move_keys(pool: PoolState, source: KVCacheBlock, target: KVCacheBlock) -> None:
    """Implement `BlockPool.move_block_hashes`."""
    check_ours(source, pool.block_owner, "move_block_hashes()")
    check_ours(target, pool.block_owner, "move_block_hashes()")
    if target.is_null:
        raise InvalidBlockError("the null block is never cached")
    secondary = pool.cached_block_hashes_by_block
    if target.key is not None or (secondary and target.block_id in secondary):
        raise InvalidBlockError(
            f"block {target.block_id} already carries a hash; evict it before you move the hashes "
            f"of block {source.block_id} to it"
        )
    num_tokens = source.block_hash_num_tokens
    parent = source.parent
    was_changing = pool.is_changing
    pool.is_changing = True
    keys: list[BlockHashWithGroupId] = []
    num_before = pool.num_evictions
    drop_keys(pool, source, keys)
    count_cause(pool, "move", num_before)
    for key in keys:
        add_key(pool, key, target, num_tokens, parent)
    if keys:
        note_own_hash(source, get_block_hash(keys[0]))
    pool.is_changing = was_changing


def note_left_out(blocks: list[KVCacheBlock], hashes: list[BlockHash], block_mask: Sequence[Any]) -> None:
    """Note the hashes of blocks that the mask leaves out: see `KVCacheBlock.parent`."""
    position: i64 = -1
    for block, block_hash in zip(blocks, hashes):  # noqa: B905 (mypyc makes a loop of this only)
        position += 1
        if not block_mask[position] and block.key is None and not block.is_null:
            note_own_hash(block, block_hash)


def add_key(
    pool: PoolState,
    key: BlockHashWithGroupId,
    block: KVCacheBlock,
    num_tokens: int | None,
    parent: bytes | None = None,
) -> None:
    """Add a key to `block`, as its primary or a secondary key, without an event. No-op if it has the key.

    Args:
        parent: see `KVCacheBlock.parent`; used for the primary key only.
    """
    check_ours(block, pool.block_owner, "_insert_block_hash()")
    if block.is_null:
        raise InvalidBlockError("the null block is never cached")
    if block.key == key or pool.cached_block_hash_to_block.contain(key, block.block_id):
        return
    is_primary = block.key is None
    if is_primary and block.num_key_tokens >= 0:
        raise InvalidBlockError(f"block {block.block_id} has a token count without a hash; call reset_hash()")
    was_changing = pool.is_changing
    pool.is_changing = True
    pool.cached_block_hash_to_block.insert(key, block)
    if is_primary:
        block.set_block_hash(key, num_tokens)
        block.parent = parent
    else:
        pool.cached_block_hashes_by_block.setdefault(block.block_id, {})[key] = None
    pool.is_changing = was_changing


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
        if block.run_id > 0:
            block.run_id = -block.run_id
        if block.owner is owner:
            if before._next_cached_id >= 0:
                before._next_cached_id = block.block_id
            before = block
    cache._num_keys += num_added
