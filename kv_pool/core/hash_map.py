"""`BlockHashToBlockMap`: from a block hash to the blocks that hold that prefix."""

from typing import Any, cast

from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import CorruptedPoolError
from kv_pool.ids import BlockHashWithGroupId


class BlockHashToBlockMap:
    """Which blocks carry which key. Several may carry one; they are not deduplicated.

    Two requests that compute the same prefix at the same time end up with two blocks of one key. Both
    stay, because a block id that was given to a request must not change under it.

    One block is stored bare, since almost every key has just one; from the second `insert` on, a key has
    a dict from block id to block, oldest first, which stays a dict down to one entry.

    Contract: vLLM 0.33 `BlockHashToBlockMap`; its callers also edit `_cache`, so it is the live state.
    """

    def __init__(self) -> None:
        # Values are KVCacheBlock | dict[int, KVCacheBlock]; Any, so that a foreign one that a caller put
        # there is told apart below, compiled as in plain Python.
        self._cache: dict[BlockHashWithGroupId, Any] = {}
        # How many keys there should be: it differs from len(_cache) once a caller edited that.
        self._num_keys: int = 0

    @property
    def entries(self) -> dict[BlockHashWithGroupId, Any]:
        """The live entries, to be looked at: from a key to its block, or to a dict of its blocks by id."""
        return self._cache

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """The block that has carried `key` longest, or None. O(1)."""
        found = self._cache.get(key)
        if found is None or isinstance(found, KVCacheBlock):
            return found
        if isinstance(found, dict):
            for block in found.values():
                return cast(KVCacheBlock, block)
            return None
        raise CorruptedPoolError(f"the prefix map holds a {type(found).__name__} for {key!r}")

    def contain(self, key: BlockHashWithGroupId, block_id: int) -> bool:
        """Does the block with this id carry `key`? O(1)."""
        found = self._cache.get(key)
        if found is None:
            return False
        if isinstance(found, KVCacheBlock):
            return found.block_id == block_id
        if isinstance(found, dict):
            return block_id in found
        raise CorruptedPoolError(f"the prefix map holds a {type(found).__name__} for {key!r}")

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        """Note that `block` carries `key`. O(1). The block's own hash is not changed."""
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

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        """Forget that the block with this id carries `key`.

        Returns:
            The block, or None when it does not carry `key`; other blocks of that key stay. O(1).
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
        """How many keys some block carries (not how many blocks)."""
        return len(self._cache)
