"""`PinLedger`: the pinned blocks, the blocks that may still be pinned, and their limit."""

from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import PinLimitError


class PinLedger:
    """The pins that count against a limit.

    Attributes:
        blocks: the pinned blocks, free or in use.
        num_promised: the number of blocks that the directives of requests may still pin.
    """

    def __init__(self, max_pinned_blocks: int) -> None:
        self.max_pinned_blocks: int = max_pinned_blocks
        self.blocks: set[KVCacheBlock] = set()
        self.num_promised: int = 0

    def note(self, block: KVCacheBlock, is_pinned: bool) -> None:
        """Record whether a block is pinned."""
        if is_pinned:
            self.blocks.add(block)
        elif self.blocks:
            self.blocks.discard(block)

    def drop(self, block: KVCacheBlock) -> None:
        """Record that the block is not pinned."""
        if self.blocks:
            self.blocks.discard(block)

    def count(self) -> int:
        """Return the number of pinned and promised blocks."""
        return len(self.blocks) + self.num_promised

    def exceeds(self, num_new: int, num_replaced: int) -> bool:
        """Return True if the pin limit would be exceeded."""
        return self.count() - num_replaced + num_new > self.max_pinned_blocks

    def refuse(self, num_new: int, num_replaced: int) -> PinLimitError:
        """Return the error for exceeding the pin limit."""
        return PinLimitError(
            f"{num_new} blocks would be pinned, and {self.count() - num_replaced} others are or may become "
            f"pinned; the limit is {self.max_pinned_blocks}. Pin less, remove pins with change_directives(), "
            "or raise max_pinned_blocks."
        )
