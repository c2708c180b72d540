"""The hooks that a pool calls: `BlockObserver` for metrics, `LowerTiers` for lower tiers."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.extra_keys import CacheableRequest
from kv_pool.core.kv_events import BlockStored
from kv_pool.ids import BlockHash, BlockHashWithGroupId, BlockId, GroupId


class BlockObserver(Protocol):
    """The metrics hooks of `BlockPool(metrics_collector=...)`.

    On an allocation with caching on, `on_block_evicted` is called for every block, with or without a hash,
    before `on_block_allocated`. Hooks must not raise and must not call back into the pool.
    Contract: vLLM 0.33 `KVCacheMetricsCollector`. `on_ids_swapped`, which compaction calls, is ours.
    """

    def on_block_allocated(self, block: KVCacheBlock) -> None: ...

    def on_block_accessed(self, block: KVCacheBlock) -> None: ...

    def on_block_evicted(self, block: KVCacheBlock) -> None: ...

    def on_ids_swapped(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Note that the blocks of each pair are about to swap their ids."""

    def reset(self) -> None: ...


class LowerTiers(Protocol):
    """The lower tiers that keep the content of evicted blocks: `BlockPool.lower_tiers`.

    Hooks must not raise and must not call back into the pool.
    """

    def on_blocks_cached(
        self,
        request: CacheableRequest,
        blocks: Sequence[KVCacheBlock],
        hashes: Sequence[BlockHash],
        num_cached_blocks: int,
        block_size: int,
        group_id: GroupId,
    ) -> None:
        """Handle newly cached blocks.

        Args:
            blocks: the blocks; null blocks among them are not cached.
            hashes: one hash per block.
            num_cached_blocks: number of blocks of the request before the first of these.
            block_size: tokens per block of this group.
        """

    def on_block_arrived(
        self, block: KVCacheBlock, block_size: int | None, event: BlockStored | None
    ) -> None:
        """Handle a cached block whose content was computed on another node or in an earlier run.

        Called by the code that loaded the content, such as a migration, after the pool's own events.

        Args:
            block_size: tokens per block of its group; None if unknown.
            event: a stored event about the block's first key only; None if there is none, as with events off.
        """

    def on_blocks_reused(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Handle cached blocks that are about to be reused. They still have their keys.

        Their bytes stay intact until the new owner writes to them. Blocks evicted for other reasons, such as
        invalid content, are not reported here.
        """

    def on_content_invalidated(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Discard what is stored under these keys: the content of their blocks was invalid.

        Called by the manager; the pool does not know why a block is evicted.
        """

    def list_parents(self) -> Mapping[BlockHashWithGroupId, tuple[bytes | None, int]]:
        """Return all stored keys, each with `KVCacheBlock.parent` of its block and the tokens of its prefix.

        None and 0 where they are not known, such as for blocks of an earlier run.
        """

    def flush_evicted(self) -> None:
        """Flush: copy the content of reused blocks out now. Afterwards they may be written or moved.

        Called through `BlockPool.flush_evicted`: by a migration before it writes, and by a compaction before
        it plans. May take as long as copying the blocks.
        """

    def on_cache_reset(self) -> None:
        """Discard all stored content: the prefix cache was reset, for example after a weight update."""
