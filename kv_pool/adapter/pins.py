"""`Pins`: the blocks pinned by the user, with counts and a limit."""

from collections.abc import Iterable, Sequence

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidBlockError, PinLimitError


class Pins:
    """The pin count of each block; one hold keeps all pinned blocks in place.

    Attributes:
        counts: number of pins by block; pinned blocks only.
        hold: holds each pinned block. After an interrupt `recover` makes it agree with `counts`.
        unpinned: blocks that lost their last pin; `AccessOrder` takes them out.

    Args:
        max_pinned_blocks: how many blocks may be pinned at once; a block pinned twice counts once.
    """

    def __init__(self, block_pool: BlockPoolCore, max_pinned_blocks: int) -> None:
        self.max_pinned_blocks = max_pinned_blocks
        self.counts: dict[KVCacheBlock, int] = {}
        self.hold = block_pool.holds.open([], "pinned")
        self.unpinned: dict[KVCacheBlock, None] = {}

    def __len__(self) -> int:
        return len(self.counts)

    def __contains__(self, block: KVCacheBlock) -> bool:
        return block in self.counts

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
        self.hold.add(after)
        counts |= after

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
        counts |= left  # in one step; `recover` does the rest after an interrupt
        for block in unpinned:
            del counts[block]
            self.unpinned[block] = None
        self.hold.remove(unpinned)

    def recover(self, unheld: Iterable[KVCacheBlock]) -> None:
        """Complete or undo an interrupted call, and drop the pins of blocks that no sequence holds."""
        for block in [*unheld, *(block for block, count in self.counts.items() if not count)]:
            self.counts.pop(block, None)
        self.hold.remove([block for block in self.hold.blocks if block not in self.counts])
        self.hold.add(self.counts)

    def is_any_pinned(self, blocks: Iterable[KVCacheBlock]) -> bool:
        return bool(self.counts) and not self.counts.keys().isdisjoint(blocks)
