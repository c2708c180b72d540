"""`SampledStack`: the LRU stack of a sample of block keys, bounded, with the rank of each.

An access uses a block and all blocks before it in its chain. They leave the request together, the first block
as the most recent one, so the blocks of a chain that an access used last are consecutive in the stack.
"""

from typing import Final

from mypy_extensions import i64

_STAMP_BITS: Final = 24
"""An access has 2**24 stamps, more than twice the blocks that it can have."""


class SampledBlock:
    """A block of the sample.

    Attributes:
        key: hash and group.
        parent: the sampled block before it in its chain, or None.
        stamp: grows with recency. Those of an access are consecutive, its first block has the largest.
        replica: the part of the sample that it belongs to.
    """

    __slots__ = ("key", "parent", "replica", "stamp")

    def __init__(self, key: bytes, parent: "SampledBlock | None", stamp: i64, replica: i64) -> None:
        self.key: bytes = key
        self.parent: SampledBlock | None = parent
        self.stamp: i64 = stamp
        self.replica: i64 = replica


class SampledStack:
    """The most recently used blocks of a sample.

    Args:
        limit: maximum number of blocks; the least recently used one is dropped for a new one.

    Attributes:
        blocks: the blocks by key.
        order: the blocks, least recently used first, so by their stamps.

    An interrupted call leaves the structures inconsistent; the caller then discards the stack.
    """

    def __init__(self, limit: i64) -> None:
        self.limit: i64 = limit
        self.blocks: dict[bytes, SampledBlock] = {}
        self.order: list[SampledBlock] = []
        self._num_accesses: i64 = 0

    def _find(self, stamp: i64) -> i64:
        """Return the number of blocks with lower stamps: the position of the block with this one."""
        order = self.order
        low: i64 = 0
        high: i64 = len(order)
        while low < high:
            middle = (low + high) >> 1
            if order[middle].stamp < stamp:
                low = middle + 1
            else:
                high = middle
        return low

    def find_rank(self, block: SampledBlock) -> i64:
        """Return the rank of a block, from 1 for the most recently used one. O(log limit)."""
        return len(self.order) - self._find(block.stamp)

    def access(self, last: SampledBlock) -> list[int]:
        """Move `last` and the blocks before it in its chain to the top. O(blocks moved + limit).

        Returns:
            The ranks that these blocks had, that of `last` first.
        """
        order = self.order
        num_blocks: i64 = len(order)
        moved: list[SampledBlock] = []
        ranks: list[int] = []
        block: SampledBlock | None = last
        while block is not None:
            start = self._find(block.stamp)
            end = start
            rank = num_blocks - start - len(moved)  # those moved from lower positions are counted, too
            while block is not None and end < len(order) and order[end] is block:
                moved.append(block)
                ranks.append(rank)
                rank -= 1
                end += 1
                block = block.parent
            del order[start:end]
        stamp = self._start_access()
        for block in moved:
            block.stamp = stamp
            stamp += 1
        order += moved
        return ranks

    def append(self, parent: SampledBlock | None, key: bytes, replica: i64) -> SampledBlock:
        """Add a block behind `parent`, the deepest block of its access, as part of that access.

        Args:
            parent: None for an access of its own.
        Returns:
            The new block, which is dropped at once if the stack is full and it is the least recently used.
        """
        order = self.order
        position: i64 = len(order)
        if parent is None:
            stamp = self._start_access()
        else:
            stamp = parent.stamp - 1
            position = self._find(stamp)
        block = SampledBlock(key, parent, stamp, replica)
        self.blocks[key] = block
        order.insert(position, block)
        if len(order) > self.limit:
            del self.blocks[order[0].key]
            del order[0]
        return block

    def is_open(self, block: SampledBlock, max_above: i64) -> bool:
        """Return True for the deepest block of an access with at most `max_above` blocks of later ones."""
        num_above = len(self.order) - self._find(((block.stamp >> _STAMP_BITS) + 1) << _STAMP_BITS)
        if num_above > max_above:
            return False
        position = self._find(block.stamp)
        return position == 0 or self.order[position - 1].stamp != block.stamp - 1

    def _start_access(self) -> i64:
        """Return the stamp of the deepest block of a new access; further blocks may be appended behind it."""
        self._num_accesses += 1
        return (self._num_accesses << _STAMP_BITS) + (1 << (_STAMP_BITS - 1))
