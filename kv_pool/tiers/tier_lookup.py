"""`TierLookup`: the tiers of a pool, asked for prefixes as a pool is; answers with keys."""

from collections.abc import Sequence

from kv_pool.core.block_keys import group_suffix
from kv_pool.ids import BlockHash, BlockHashWithGroupId
from kv_pool.tiers.tiered_cache import TieredCache


class TierLookup:
    """A `PrefixLookup`. Whichever tier has a block: a prefix may change between them from block to block."""

    def __init__(self, tiered_cache: TieredCache) -> None:
        self.enable_caching = tiered_cache.block_pool.enable_caching
        self.hash_block_size = tiered_cache.block_pool.hash_block_size
        self._tiered_cache = tiered_cache

    def find_cached_prefix(
        self, block_hashes: Sequence[BlockHash], max_num_blocks: int, kv_cache_group_id: int = 0, /
    ) -> list[BlockHashWithGroupId]:
        """The keys of the longest prefix that the tiers have, head first."""
        suffix = group_suffix(kv_cache_group_id)
        indexes = self._tiered_cache.list_indexes()
        found: list[BlockHashWithGroupId] = []
        for block_hash in block_hashes[: max(0, max_num_blocks)]:
            key = BlockHashWithGroupId(block_hash + suffix)
            for index in indexes:
                if key in index:
                    break
            else:
                return found
            found.append(key)
        return found
