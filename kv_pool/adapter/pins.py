"""`Pins`: the blocks pinned by the user, with counts and a limit."""

from collections.abc import Collection, Iterable, Sequence

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidBlockError, PinLimitError


class Pins:
    """The pin count of each block; one hold keeps all pinned blocks in place.

    Attributes:
        counts: number of pins by block; pinned blocks only.
        hold: holds each pinned block.
        unpinned: blocks that lost their last pin; `AccessOrder` takes them out.

    Args:
        limit: how many blocks may be pinned at once, None for all; a block pinned twice counts once.
    """

    def __init__(self, block_pool: BlockPoolCore, limit: int | None) -> None:
        self.limit = limit
        self._pool = block_pool
        self.counts: dict[KVCacheBlock, int] = {}
        self.hold = block_pool.holds.open([], "pinned")
        self.unpinned: dict[KVCacheBlock, None] = {}

    def __len__(self) -> int:
        return len(self.counts)

    def __contains__(self, block: KVCacheBlock) -> bool:
        return block in self.counts

    @property
    def max_pinned_blocks(self) -> int:
        """How many blocks may be pinned at once."""
        return len(self._pool.blocks) - 1 if self.limit is None else self.limit

    def check_room(self, num_blocks: int) -> None:
        """Raise PinLimitError unless `num_blocks` more may be pinned."""
        if len(self.counts) + num_blocks > self.max_pinned_blocks:
            raise PinLimitError(
                f"{len(self.counts)} blocks are pinned; {num_blocks} more would exceed the limit of "
                f"{self.max_pinned_blocks}. Unpin others, or raise max_pinned_blocks."
            )

    def pin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add one pin to each block. Raises PinLimitError with nothing changed."""
        counts = self.counts
        after: dict[KVCacheBlock, int] = {}
        for block in blocks:
            after[block] = (after[block] if block in after else counts.get(block, 0)) + 1
        self.check_room(len(after) - len(counts.keys() & after.keys()))
        pool = self._pool
        was_changing = pool.is_changing
        pool.is_changing = True
        pool.holds.take_references(self.hold, [block for block in after if block not in counts])
        counts |= after
        pool.is_changing = was_changing

    def unpin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove one pin from each block.

        Raises:
            InvalidBlockError: a block has fewer pins than that. Nothing has changed.
        """
        counts = self.counts
        left: dict[KVCacheBlock, int] = {}
        for block in blocks:
            count = (left[block] if block in left else counts.get(block, 0)) - 1
            if count < 0:
                raise InvalidBlockError(f"block {block.block_id} is not pinned. Was it unpinned twice?")
            left[block] = count
        unpinned = [block for block, count in left.items() if not count]
        pool = self._pool
        was_changing = pool.is_changing
        pool.is_changing = True
        counts |= left
        for block in unpinned:
            del counts[block]
            self.unpinned[block] = None
        pool.holds.drop_references(self.hold, unpinned)
        pool.is_changing = was_changing

    def repair(self, held: Collection[KVCacheBlock]) -> None:
        """Keep the pins of these blocks, before the pool counts its references again."""
        self.counts = {block: count for block, count in self.counts.items() if count and block in held}
        self.hold.forget(self.counts)

    def is_any_pinned(self, blocks: Iterable[KVCacheBlock]) -> bool:
        return bool(self.counts) and not self.counts.keys().isdisjoint(blocks)
