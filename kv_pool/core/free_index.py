"""`FreeIndex`: an index of the free blocks that a pool keeps up to date."""

from collections.abc import Sequence
from typing import Any

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import BlockId


@mypyc_attr(allow_interpreted_subclasses=False)
class FreeIndex:
    """An index of a pool's free blocks: `PoolState.free_index`.

    The pool calls these methods as part of each change. Blocks of other owners are skipped.
    """

    def take(self, pool: Any, after: KVCacheBlock | None, num_blocks: int) -> list[KVCacheBlock] | None:
        """Take blocks that the index chooses, preferably those with the ids after that of `after`.

        Args:
            pool: the pool, a `PoolState`, which has at least as many free blocks.
        Returns:
            The blocks, as `get_new_blocks` returns them; None if the index has no choice: take the first.
        """
        raise NotImplementedError

    def note_taken(self, blocks: list[KVCacheBlock], owner: Any) -> None:
        """Mark these blocks as in use."""
        raise NotImplementedError

    def note_freed(
        self,
        blocks: list[KVCacheBlock],
        owner: Any,
        num_free_blocks: int,
        keeps_hashes: bool,
        keeps_all: bool,
    ) -> None:
        """Mark as free those of these blocks that have no reference left.

        Args:
            num_free_blocks: free blocks in the whole pool now.
            keeps_hashes: blocks with a hash have content.
            keeps_all: all blocks have content.
        """
        raise NotImplementedError

    def note_moved_to(self, blocks: list[KVCacheBlock], band: int) -> None:
        """Handle free blocks that were moved to a band of the eviction order."""
        raise NotImplementedError

    def note_emptied(self, block_id: BlockId) -> None:
        """Record that the block has lost its content; a free block stays free."""
        raise NotImplementedError

    def note_all_emptied(self) -> None:
        """Record that all blocks have lost their content."""
        raise NotImplementedError

    def swap(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Record that the two blocks of each pair have exchanged their ids."""
        raise NotImplementedError

    def resize(self, num_blocks: int) -> None:
        """Change the number of blocks. New blocks are free and empty; removed blocks must have been free."""
        raise NotImplementedError

    def rebuild_from(self, pool: Any) -> None:
        """Rebuild the index from the pool's free queue. O(blocks)."""
        raise NotImplementedError
