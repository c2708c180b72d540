"""`CachedKey`: one prefix that a pool has cached."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.core.hash_map import BlockHashToBlockMap
from kv_pool.ids import BlockHash, ExternalBlockHash, GroupId


class CachedKey(NamedTuple):
    """A prefix that can be hit in one KV cache group.

    Attributes:
        block_hash: the hash of the prefix's last block.
        group_id: the KV cache group.
        external_hash: the hash in the form that events carry.
    """

    block_hash: BlockHash
    group_id: GroupId
    external_hash: ExternalBlockHash


def iter_cached_keys(
    cached: BlockHashToBlockMap, make_external_hash: Callable[[BlockHash], ExternalBlockHash]
) -> Iterator[CachedKey]:
    """Iterate over the keys that are cached at the time of the call, in no particular order."""
    keys = list(cached._cache)
    return (
        CachedKey(block_hash, get_group_id(key), make_external_hash(block_hash))
        for key in keys
        for block_hash in (get_block_hash(key),)
    )
