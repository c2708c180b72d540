"""`SampledStack`: the LRU stack of a sample of block keys, bounded, with the rank of each.

An access uses a block and all blocks before it in its chain. They leave the request together, the first block
as the most recent one, so the blocks of a chain that an access used last are consecutive in the stack.
"""

from bisect import bisect_left
from typing import Final

from mypy_extensions import i64

_STAMPS_PER_ACCESS: Final = 2**24
"""More than twice the blocks that one access can have."""


class SampledBlock:
    """A block of the sample.

    Attributes:
        key: hash and group.
        parent: the sampled block before it in its chain, or None.
        stamp: grows with recency. Those of an access are consecutive, its first block has the largest.
        replica: the part of the sample that it belongs to.
    """

    __slots__ = ("key", "parent", "replica", "stamp")

    def __init__(self, key: bytes, parent: "SampledBlock | None", stamp: int, replica: i64) -> None:
        self.key: bytes = key
        self.parent: SampledBlock | None = parent
        self.stamp: int = stamp
        self.replica: i64 = replica


class SampledStack:
    """The most recently used blocks of a sample.

    Args:
        limit: maximum number of blocks; the least recently used one is dropped for a new one.

    Attributes:
        blocks: the blocks by key.
        order: the blocks, least recently used first.
        stamps: their stamps: bisection finds a block in `order`.

    An interrupted call leaves the structures inconsistent; the caller then discards the stack.
    """

    def __init__(self, limit: i64) -> None:
        self.limit: i64 = limit
        self.blocks: dict[bytes, SampledBlock] = {}
        self.order: list[SampledBlock] = []
        self.stamps: list[int] = []
        self._num_accesses: int = 0

    def find_rank(self, block: SampledBlock) -> int:
        """Return the rank of a block, from 1 for the most recently used one. O(log limit)."""
        return len(self.order) - bisect_left(self.stamps, block.stamp)

    def access(self, last: SampledBlock) -> None:
        """Move `last` and the blocks before it in its chain to the top. O(blocks moved + limit)."""
        if last.stamp // _STAMPS_PER_ACCESS == self._num_accesses and self._is_deepest(last):
            return  # so are the blocks before it, which are never used less recently
        moved: list[SampledBlock] = []
        block: SampledBlock | None = last
        while block is not None:
            start = bisect_left(self.stamps, block.stamp)
            end = start
            while block is not None and end < len(self.order) and self.order[end] is block:
                moved.append(block)
                end += 1
                block = block.parent
            del self.order[start:end]
            del self.stamps[start:end]
        stamp = self._start_access()
        for block in moved:
            block.stamp = stamp
            self.stamps.append(stamp)
            stamp += 1
        self.order += moved

    def append(self, parent: SampledBlock | None, key: bytes, replica: i64) -> SampledBlock | None:
        """Add a block behind `parent`, the deepest block of its access, as part of that access.

        Args:
            parent: None for an access of its own.
        Returns:
            The deepest sampled block of the chain: the new one, or `parent` if the stack is full and the new
            one would be the least recently used.
        """
        stamp = self._start_access() if parent is None else parent.stamp - 1
        block = SampledBlock(key, parent, stamp, replica)
        position = bisect_left(self.stamps, stamp)
        self.blocks[key] = block
        self.order.insert(position, block)
        self.stamps.insert(position, stamp)
        if len(self.order) > self.limit:
            del self.blocks[self.order[0].key]
            del self.order[0]
            del self.stamps[0]
            if position == 0:
                return parent
        return block

    def is_open(self, block: SampledBlock, max_above: i64) -> bool:
        """Return True for the deepest block of an access with at most `max_above` blocks of later ones."""
        next_access = (block.stamp // _STAMPS_PER_ACCESS + 1) * _STAMPS_PER_ACCESS
        num_above = len(self.order) - bisect_left(self.stamps, next_access)
        return num_above <= max_above and self._is_deepest(block)

    def _is_deepest(self, block: SampledBlock) -> bool:
        """Return True if no block of its access is behind it."""
        position = bisect_left(self.stamps, block.stamp)
        return position == 0 or self.stamps[position - 1] != block.stamp - 1

    def _start_access(self) -> int:
        """Return the stamp of the deepest block of a new access; further blocks may be appended behind it."""
        self._num_accesses += 1
        return self._num_accesses * _STAMPS_PER_ACCESS + _STAMPS_PER_ACCESS // 2
