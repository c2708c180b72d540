"""`BlockHashToBlockMap`: map a key (block hash and group) to the blocks with that prefix."""

from typing import Any, NamedTuple, cast

from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import CorruptedPoolError
from kv_pool.ids import BlockHash, BlockHashWithGroupId, BlockId, ExternalBlockHash, GroupId


class BlockHashToBlockMap:
    """A map from keys to blocks. Several blocks may carry the same key; they are not deduplicated.

    Two requests that compute the same prefix at the same time produce two blocks with one key. Both stay,
    because the block ids in a request's table must not change while it runs.

    Almost every key has one block, so a single block is stored bare. From the second `insert` on, the entry
    is a dict from block id to block, oldest first; it remains a dict when only one block is left.

    Contract: vLLM 0.33 `BlockHashToBlockMap`; its callers also edit `_cache`, so that is the live state.
    """

    def __init__(self) -> None:
        # Values are KVCacheBlock | dict[BlockId, KVCacheBlock]. Declared Any, so that the methods below
        # detect any other type that a caller put there, compiled as in plain Python.
        self._cache: dict[BlockHashWithGroupId, Any] = {}
        # The expected number of keys; differs from len(_cache) if a caller edited `_cache`.
        self._num_keys: int = 0

    @property
    def entries(self) -> dict[BlockHashWithGroupId, Any]:
        """The live entries, read-only: key -> block, or key -> dict of blocks by id."""
        return self._cache

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """Return the block that has carried `key` longest, or None. O(1)."""
        found = self._cache.get(key)
        if found is None or isinstance(found, KVCacheBlock):
            return found
        if isinstance(found, dict):
            for block in found.values():
                return cast(KVCacheBlock, block)
            return None
        raise CorruptedPoolError(f"the prefix map holds a {type(found).__name__} for {key!r}")

    def contain(self, key: BlockHashWithGroupId, block_id: BlockId) -> bool:
        """Return True if the block with this id carries `key`. O(1)."""
        found = self._cache.get(key)
        if found is None:
            return False
        if isinstance(found, KVCacheBlock):
            return found.block_id == block_id
        if isinstance(found, dict):
            return block_id in found
        raise CorruptedPoolError(f"the prefix map holds a {type(found).__name__} for {key!r}")

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        """Add `block` under `key`. O(1). The block's own hash does not change."""
        found = self._cache.get(key)
        if found is None:
            self._cache[key] = block
            self._num_keys += 1
        elif isinstance(found, KVCacheBlock):
            found._next_cached_id = -1
            block._next_cached_id = -1
            self._cache[key] = {found.block_id: found, block.block_id: block}
        elif isinstance(found, dict):
            block._next_cached_id = -1
            found[block.block_id] = block
        else:
            raise CorruptedPoolError(f"the prefix map holds a {type(found).__name__} for {key!r}")

    def pop(self, key: BlockHashWithGroupId, block_id: BlockId) -> KVCacheBlock | None:
        """Remove the block with this id from `key`. Other blocks of that key stay. O(1).

        Returns:
            The block, or None if it does not carry `key`.
        """
        found = self._cache.get(key)
        if found is None:
            return None
        if isinstance(found, KVCacheBlock):
            if found.block_id != block_id:
                return None
            found._next_cached_id = -1
            del self._cache[key]
            self._num_keys -= 1
            return found
        if isinstance(found, dict):
            block: KVCacheBlock | None = found.pop(block_id, None)
            if not found:
                del self._cache[key]
                self._num_keys -= 1
            return block
        raise CorruptedPoolError(f"the prefix map holds a {type(found).__name__} for {key!r}")

    def __len__(self) -> int:
        """Return the number of keys (not of blocks)."""
        return len(self._cache)


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
