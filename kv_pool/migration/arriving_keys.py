"""`insert_keys`: registers a received block under its source's cache keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.core.caching import add_key
from kv_pool.core.kv_events import BlockStored
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.core.stored_events import make_stored
from kv_pool.ids import BlockHash, BlockHashWithGroupId, GroupId
from kv_pool.migration.site import OfferedBlock


@dataclass(frozen=True)
class KnownTokens:
    """A stand-in for a request in block events, of which only the tokens and hashes are known."""

    all_token_ids: Sequence[int] = ()
    block_hashes: Sequence[BlockHash] = ()
    lora_request: Any = None
    mm_features: None = None
    cache_salt: None = None
    session_id: None = None


def insert_keys(
    pool: BlockPoolCore,
    block: KVCacheBlock,
    offered: OfferedBlock,
    find_block_size: Callable[[GroupId], int],
) -> None:
    """Register a received block under its source's cache keys.

    Publish one `BlockStored` for each key and notify the lower tiers. The caller has set `is_changing`.

    Args:
        block: in use, with the content of the source's block.
        find_block_size: returns the tokens per block of a KV cache group.

    The events carry the tokens if the source knows them, and no tokens otherwise.
    """

    def make_event(key: BlockHashWithGroupId, make: Any = None) -> Any:
        parent = None if offered.parent is None else BlockHash(offered.parent)
        group_id = get_group_id(key)
        known = KnownTokens(list(offered.token_ids))
        return make_stored(
            pool, known, [get_block_hash(key)], parent, 0, find_block_size(group_id), group_id, make
        )

    keys = [BlockHashWithGroupId(key) for key in offered.keys]
    before: bytes | None = None
    if keys and offered.parent is not None:
        before = offered.parent + keys[0][-4:]
    elif keys and 0 < (offered.num_tokens or 0) <= find_block_size(get_group_id(keys[0])):
        before = b""
    pool.origins.note_copy(block, None)
    for key in keys:
        add_key(pool, key, block, offered.num_tokens, before)
        if pool.enable_kv_cache_events:
            pool.kv_event_queue.append(make_event(key))
    if keys and pool.lower_tiers is not None:
        event = make_event(keys[0], BlockStored) if pool.enable_kv_cache_events else None
        pool.lower_tiers.on_block_arrived(block, find_block_size(get_group_id(keys[0])), event)


def list_keys(pool: BlockPoolCore, block: KVCacheBlock) -> tuple[bytes, ...]:
    """Return all keys of a block, the primary one first; () if the block is not cached."""
    if block.block_hash is None:
        return ()
    return (block.block_hash, *pool.cached_block_hashes_by_block.get(block.block_id, ()))
