"""The hooks through which a pool lets itself be watched."""

from collections.abc import Sequence
from typing import Protocol

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.extra_keys import CacheableRequest
from kv_pool.core.kv_events import BlockStored
from kv_pool.ids import BlockHash, BlockHashWithGroupId


class BlockObserver(Protocol):
    """What `BlockPool(metrics_collector=...)` calls, in the order things happen to a block.

    `on_block_evicted` comes before `on_block_allocated` of the same hand-out, and is called for every
    block taken while caching is on, whether or not it still had a hash. Hooks must not raise nor call
    back into the pool. Contract: vLLM 0.33 `KVCacheMetricsCollector`.
    """

    def on_block_allocated(self, block: KVCacheBlock) -> None: ...

    def on_block_accessed(self, block: KVCacheBlock) -> None: ...

    def on_block_evicted(self, block: KVCacheBlock) -> None: ...

    def reset(self) -> None: ...


class ColderTiers(Protocol):
    """Where the content of cached blocks goes on when they are taken anew: `BlockPool.colder_tiers`.

    Hooks must not raise nor call back into the pool.
    """

    def on_blocks_cached(
        self,
        request: CacheableRequest,
        blocks: Sequence[KVCacheBlock],
        hashes: Sequence[BlockHash],
        num_cached_blocks: int,
        block_size: int,
        group_id: int,
    ) -> None:
        """These blocks can be hit now by these hashes, one each; null blocks are among them and can not.

        Args:
            num_cached_blocks: blocks of the request before the first of these.
            block_size: tokens per block of this group.
        """

    def on_block_arrived(self, block: KVCacheBlock, block_size: int | None, told: BlockStored | None) -> None:
        """This block has content that was computed elsewhere or before, and can be hit by its keys now.

        Told by who brought it, such as a migration, after the pool's own events.

        Args:
            block_size: tokens per block of its group; None if that is not known.
            told: an event about its first key alone; None with events off, or if nothing is known.
        """

    def on_blocks_reused(self, blocks: Sequence[KVCacheBlock]) -> None:
        """These blocks are being taken anew, and lose the keys that they have now.

        Their bytes stay until whoever takes them writes. What is evicted for another reason, such as
        content that is wrong, is not among them.
        """

    def on_content_invalidated(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """The content of blocks with these keys was wrong, and so is what was stored of it.

        Told by a manager, not by the pool, which does not know why a block is evicted.
        """

    def store_pending(self) -> None:
        """Copy out now what the blocks that were taken still hold; they may be written or moved afterwards.

        Called through `BlockPool.store_pending`, by a migration before it writes, by a compaction before it
        plans. May take as long as copying the blocks.
        """

    def on_cache_reset(self) -> None:
        """The prefix cache was reset, as after a change of weights: what was stored before is void."""
