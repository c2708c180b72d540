"""`CachedKey`: one prefix that a pool has cached now."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.core.hash_map import BlockHashToBlockMap
from kv_pool.ids import BlockHash, ExternalBlockHash


class CachedKey(NamedTuple):
    """A prefix that can be hit in one KV cache group.

    Attributes:
        block_hash: the digest of its last block.
        group_id: the KV cache group.
        external_hash: the hash by which events name it.
    """

    block_hash: BlockHash
    group_id: int
    external_hash: ExternalBlockHash


def iter_cached_keys(
    cached: BlockHashToBlockMap, make_external_hash: Callable[[BlockHash], ExternalBlockHash]
) -> Iterator[CachedKey]:
    """Iterate over the keys that were cached at the call, in no particular order."""
    keys = list(cached._cache)
    return (
        CachedKey(block_hash, get_group_id(key), make_external_hash(block_hash))
        for key in keys
        for block_hash in (get_block_hash(key),)
    )
