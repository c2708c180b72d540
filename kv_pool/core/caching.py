"""Making blocks findable: full blocks, partial ones, keys that move with a copy."""

from collections.abc import Sequence
from typing import Any, cast

from mypy_extensions import i32, i64

from kv_pool.core.arguments import as_int, as_list, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_checks import check_ours, raise_typed
from kv_pool.core.block_keys import group_suffix, make_block_hash_with_group_id
from kv_pool.core.evicting import drop_keys, evict
from kv_pool.core.extra_keys import CacheableRequest
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.pool_state import MOVING_KEYS, NOTHING, UNDO_CACHING, PoolState
from kv_pool.core.prefix_keys import add_keys, insert_key
from kv_pool.core.stored_events import hashes_of, make_dense, make_stored, read_hashes
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, InvalidTypeError
from kv_pool.ids import BlockHash, BlockHashWithGroupId


def cache_full(
    pool: PoolState,
    request: CacheableRequest,
    blocks: Sequence[KVCacheBlock],
    num_cached_blocks: int,
    num_full_blocks: int,
    block_size: int,
    kv_cache_group_id: int,
    block_mask: Sequence[Any] | None,
) -> None:
    """See `BlockPool.cache_full_blocks`."""
    if not isinstance(num_cached_blocks, int):
        num_cached_blocks = as_int("num_cached_blocks", num_cached_blocks)
    if not isinstance(num_full_blocks, int):
        num_full_blocks = as_int("num_full_blocks", num_full_blocks)
    if not isinstance(block_size, int):
        block_size = as_int("block_size", block_size)
    if not isinstance(kv_cache_group_id, int):
        kv_cache_group_id = as_int("kv_cache_group_id", kv_cache_group_id)
    if num_cached_blocks >= num_full_blocks:
        return
    if not isinstance(blocks, (list, tuple)):
        blocks = as_list("blocks", blocks)
    if block_mask is not None and not isinstance(block_mask, (list, tuple)):
        block_mask = as_list("block_mask", block_mask)
    if pool._unfinished != NOTHING:
        pool._recover()
    suffix = group_suffix(kv_cache_group_id)
    range_blocks: list[KVCacheBlock] = as_list("blocks", blocks[num_cached_blocks:num_full_blocks])
    num_blocks = num_full_blocks - num_cached_blocks
    if num_cached_blocks < 0 or len(range_blocks) != num_blocks:
        raise InvalidArgumentError(
            f"blocks {num_cached_blocks}..{num_full_blocks} of a table of {len(blocks)} blocks"
        )
    if block_mask is not None and len(block_mask) != num_blocks:
        raise InvalidArgumentError(f"block_mask has {len(block_mask)} flags for {num_blocks} blocks")
    hashes = hashes_of(pool, request, num_cached_blocks, num_full_blocks, block_size)
    owner = pool.block_owner
    num_tokens: i32 = num_cached_blocks * block_size
    step: i32 = block_size
    num_skipped: i64 = 0
    index: i64 = -1
    try:
        for block, block_hash in zip(range_blocks, hashes):  # noqa: B905 (mypyc makes a loop of this only)
            num_tokens += step
            index += 1
            if block.is_null or (block_mask is not None and not block_mask[index]):
                num_skipped += 1
                continue
            if block.owner is not owner:
                check_ours(block, owner, "cache_full_blocks()")
            elif block.ref_cnt <= 0:
                raise InvalidBlockError(f"block {block.block_id} is free; only blocks in use can be cached")
            if block.key is not None and not 0 <= block.num_key_tokens < num_tokens:
                raise InvalidBlockError(
                    f"block {block.block_id} is cached for {block.block_hash_num_tokens} tokens "
                    f"already; only a hash over more than that replaces it, this one covers {num_tokens}"
                )
            if not isinstance(block_hash, bytes):
                raise InvalidTypeError(f"a block hash is a {type(block_hash).__name__}; hashes are bytes")
    except Exception as error:
        raise_typed(error, range_blocks, "cache_full_blocks()")
    if num_skipped:
        range_blocks = [
            pool.blocks[0] if block_mask is not None and not block_mask[position] else block
            for position, block in enumerate(range_blocks)
        ]

    # Built before anything changes, since it reads the request; appended after the removals.
    new_events: list[KVCacheEvent] | None = None
    if pool.enable_kv_cache_events:
        parent: BlockHash | None = None
        if num_cached_blocks:
            (parent,) = hashes_of(pool, request, num_cached_blocks - 1, num_cached_blocks, block_size)
        stored: list[BlockHash | None] = cast(Any, hashes)
        if num_skipped:
            stored = [
                None if range_blocks[position].is_null else block_hash
                for position, block_hash in enumerate(hashes)
            ]
        start = num_cached_blocks * block_size
        if num_skipped and pool.dense_events:
            new_events = make_dense(
                pool, request, stored, hashes, parent, start, block_size, kv_cache_group_id
            )
        else:
            new_events = [make_stored(pool, request, stored, parent, start, block_size, kv_cache_group_id)]
    before = blocks[num_cached_blocks - 1] if num_cached_blocks else pool.blocks[0]
    cache = pool.cached_block_hash_to_block
    is_sure = cache._num_keys == len(cache._cache)
    try:
        add_keys(pool, before, range_blocks, hashes, suffix, num_cached_blocks * block_size, block_size)
        if new_events is not None:
            events = pool.kv_event_queue
            events += new_events
    except BaseException:
        pool._is_map_sure = is_sure
        pool._unfinished_blocks = range_blocks
        pool._unfinished_hashes = hashes
        pool._unfinished_suffix = suffix
        pool._unfinished = UNDO_CACHING
        pool._recover()
        raise
    if pool.colder_tiers is not None:
        pool.colder_tiers.on_blocks_cached(
            request, range_blocks, hashes, num_cached_blocks, block_size, kv_cache_group_id
        )


def cache_partial(
    pool: PoolState,
    request: CacheableRequest,
    block: KVCacheBlock,
    num_tokens: int,
    kv_cache_group_id: int,
    block_size: int,
    replace_existing_hashes: bool,
) -> BlockHashWithGroupId | None:
    """See `BlockPool.cache_partial_block`."""
    if not isinstance(block, KVCacheBlock):
        refuse_type("block", block, "KVCacheBlock")
    if not isinstance(num_tokens, int):
        num_tokens = as_int("num_tokens", num_tokens)
    if not isinstance(kv_cache_group_id, int):
        kv_cache_group_id = as_int("kv_cache_group_id", kv_cache_group_id)
    if not isinstance(block_size, int):
        block_size = as_int("block_size", block_size)
    if not isinstance(replace_existing_hashes, bool):
        refuse_type("replace_existing_hashes", replace_existing_hashes, "bool")
    if block.is_null:
        return None
    if pool._unfinished != NOTHING:
        pool._recover()
    if block.owner is not pool.block_owner:
        check_ours(block, pool.block_owner, "cache_partial_block()")
    if block.ref_cnt <= 0 and block.owner is not None:
        raise InvalidBlockError(f"block {block.block_id} is free; only blocks in use can be cached")
    unit = pool.hash_block_size
    if block_size < 1 or block_size % unit:
        raise InvalidArgumentError(f"block_size {block_size} is not a multiple of hash_block_size {unit}")
    num_units = num_tokens // unit
    num_hashed = len(read_hashes(request))
    if num_tokens % unit or num_units < 1 or num_units > num_hashed:
        raise InvalidArgumentError(
            f"num_tokens is {num_tokens}; a partial entry covers a multiple of {unit} tokens, here "
            f"{unit} to {num_hashed * unit}"
        )
    (block_hash,) = hashes_of(pool, request, num_units - 1, num_units, unit)
    key = make_block_hash_with_group_id(block_hash, kv_cache_group_id)
    covered = block.block_hash_num_tokens
    is_known = not replace_existing_hashes and (
        block.key == key or pool.cached_block_hash_to_block.contain(key, block.block_id)
    )
    if is_known:
        return key
    event: KVCacheEvent | None = None
    if pool.enable_kv_cache_events:
        parent: BlockHash | None = None
        if num_units > 1:
            (parent,) = hashes_of(pool, request, num_units - 2, num_units - 1, unit)
        event = make_stored(pool, request, [block_hash], parent, num_tokens - unit, unit, kv_cache_group_id)
    if replace_existing_hashes or (covered is not None and covered < num_tokens):
        evict(pool, block)
    if event is None:
        give_key(pool, key, block, num_tokens)
        return key
    events = pool.kv_event_queue
    new_events = [event]
    try:
        give_key(pool, key, block, num_tokens)
        events += new_events
    except MemoryError:
        evict(pool, block)  # the key may be there without its event
        raise
    return key


def give_key(pool: PoolState, key: BlockHashWithGroupId, block: KVCacheBlock, num_tokens: int | None) -> None:
    """Give `block` one more key; no event. A key that the block has already changes nothing."""
    if block.owner is not pool.block_owner:
        check_ours(block, pool.block_owner, "_insert_block_hash()")
    if block.is_null:
        raise InvalidBlockError("the null block is never cached")
    if block.key == key or pool.cached_block_hash_to_block.contain(key, block.block_id):
        return
    insert_key(pool, key, block, num_tokens)


def move_hashes(pool: PoolState, src_block: KVCacheBlock, dst_block: KVCacheBlock) -> None:
    """See `BlockPool.move_block_hashes`."""
    if not isinstance(src_block, KVCacheBlock):
        refuse_type("src_block", src_block, "KVCacheBlock")
    if not isinstance(dst_block, KVCacheBlock):
        refuse_type("dst_block", dst_block, "KVCacheBlock")
    if src_block.owner is not pool.block_owner:
        check_ours(src_block, pool.block_owner, "move_block_hashes()")
    if dst_block.owner is not pool.block_owner:
        check_ours(dst_block, pool.block_owner, "move_block_hashes()")
    if dst_block.is_null:
        raise InvalidBlockError("the null block is never cached")
    secondary = pool.cached_block_hashes_by_block
    if dst_block.key is not None or (secondary and dst_block.block_id in secondary):
        raise InvalidBlockError(
            f"block {dst_block.block_id} carries hashes of its own; evict it before it takes over those "
            f"of block {src_block.block_id}"
        )
    num_tokens = src_block.block_hash_num_tokens
    keys: list[BlockHashWithGroupId] = []
    try:
        drop_keys(pool, src_block, keys)
        for key in keys:
            give_key(pool, key, dst_block, num_tokens)
    except BaseException:
        pool._moved_keys = keys
        pool._moved_num_tokens = num_tokens
        pool._unfinished_blocks = [src_block, dst_block]
        pool._unfinished = MOVING_KEYS
        pool._recover()
        raise


def emit_cached(
    pool: PoolState,
    request: CacheableRequest,
    num_cached_blocks: int,
    block_size: int,
    kv_cache_group_id: int,
) -> None:
    """See `BlockPool.emit_cached_block_events`."""
    if not isinstance(num_cached_blocks, int):
        num_cached_blocks = as_int("num_cached_blocks", num_cached_blocks)
    if not isinstance(block_size, int):
        block_size = as_int("block_size", block_size)
    if not isinstance(kv_cache_group_id, int):
        kv_cache_group_id = as_int("kv_cache_group_id", kv_cache_group_id)
    if not pool.enable_kv_cache_events or num_cached_blocks <= 0:
        return
    hashes: list[BlockHash | None] = [*hashes_of(pool, request, 0, num_cached_blocks, block_size)]
    event = make_stored(pool, request, hashes, None, 0, block_size, kv_cache_group_id, pool.reported_type)
    pool.kv_event_queue.append(event)
