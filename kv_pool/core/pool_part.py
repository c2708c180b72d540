"""The interfaces that a pool calls as it changes: `PoolPart`, `BlockObserver` for metrics, `LowerTiers`."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mypy_extensions import i64, mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.extra_keys import CacheableRequest
from kv_pool.core.kv_events import BlockStored
from kv_pool.ids import BlockHash, BlockHashWithGroupId, BlockId, GroupId


@mypyc_attr(allow_interpreted_subclasses=True)  # a band policy may be one
class PoolPart:
    """Follows the changes of a pool, as an index, a band policy or a curve does: see `PoolState.parts`.

    The pool calls these methods as parts of its changes; without an override they do nothing. The blocks of a
    list may include blocks of other pools, null blocks and, after a free, blocks that are still in use.
    """

    def order_victims(self, num_blocks: int) -> None:
        """Prepare the free queue: this many blocks are about to be taken from its front."""

    def note_missed(self, key: Any) -> None:
        """Handle a lookup whose first missing block has this key."""

    def note_taken(self, blocks: list[KVCacheBlock]) -> None:
        """Handle free blocks that have left the queue, also while their reuse watchers are called."""

    def note_relinked(self, blocks: list[KVCacheBlock]) -> None:
        """Handle free blocks that are back at the front of the queue after their watchers were called."""

    def note_touched(self, blocks: list[KVCacheBlock], num_free: i64, is_access: bool) -> None:
        """Handle blocks that have got a reference.

        Args:
            num_free: number of those that were free, and have left the queue.
            is_access: a request has hit them; False for a hold.
        """

    def note_freed(self, blocks: list[KVCacheBlock], keeps_all: bool) -> None:
        """Handle blocks that have lost a reference. Those without one are in the queue.

        Args:
            keeps_all: by `unpin_blocks`: those without a hash have content, too.
        """

    def note_cached(
        self,
        request: Any,
        table: Any,
        blocks: list[KVCacheBlock],
        num_before: int,
        block_size: int,
        group_id: GroupId,
    ) -> None:
        """Handle blocks that a request has cached.

        Args:
            table: the request's blocks from the start.
            blocks: the blocks of the table from `num_before` on that were cached; null for others.
        """

    def note_moved_to(self, blocks: list[KVCacheBlock], band: int) -> None:
        """Handle free blocks that were moved to a band of the eviction order."""

    def note_emptied(self, block_id: BlockId) -> None:
        """Handle a block that has lost its content. If it is free, it stays where it is."""

    def note_removed(self, blocks: list[KVCacheBlock]) -> None:
        """Handle free blocks that were removed from the pool."""

    def note_swapped(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Handle blocks of which the two of each pair have exchanged their ids."""

    def note_resized(self, num_blocks: int) -> None:
        """Handle another number of blocks. New blocks are free and empty."""

    def note_reset(self) -> None:
        """Handle a reset of the prefix cache: all blocks are without content."""

    def begin_repair(self) -> None:
        """Forget references to blocks, before a repair counts all references."""

    def rebuild_from(self, pool: Any) -> None:
        """Rebuild what follows from the free queue. O(blocks)."""


@mypyc_attr(allow_interpreted_subclasses=False)
class FreeIndex(PoolPart):
    """An index of a pool's free blocks, which chooses blocks to take: `PoolState.free_index`."""

    def take(self, pool: Any, after: KVCacheBlock | None, num_blocks: int) -> list[KVCacheBlock] | None:
        """Take blocks that the index chooses, preferably those with the ids after that of `after`.

        Args:
            pool: the pool, a `PoolState`, which has at least as many free blocks.
        Returns:
            The blocks, as `get_new_blocks` returns them; None if the index has no choice: take the first.
        """
        raise NotImplementedError


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
