"""`SampledStack`: the LRU stack of a sample of block keys, bounded, with the rank of each.

An access uses a block and all blocks before it in its chain. They leave the request together, the first block
as the most recent one, so the stack is a list of accesses with one stretch of a chain each, and the blocks of
a chain that an access used last have consecutive ranks. A Fenwick tree over the accesses counts the blocks
above one.
"""

from mypy_extensions import i64


class SampledBlock:
    """A block of the sample.

    Attributes:
        key: hash and group.
        parent: the sampled block before it in its chain, or None.
        number: the access that used it last.
        replica: the part of the sample that it belongs to.
    """

    __slots__ = ("key", "number", "parent", "replica")

    def __init__(self, key: bytes, parent: "SampledBlock | None", number: i64, replica: i64) -> None:
        self.key: bytes = key
        self.parent: SampledBlock | None = parent
        self.number: i64 = number
        self.replica: i64 = replica


class SampledStack:
    """The most recently used blocks of a sample.

    Args:
        limit: maximum number of blocks; the least recently used one is dropped for a new one.

    Attributes:
        blocks: the blocks by key.
        oldest: no access with a lower number has blocks.
        next_number: the number of the next access. Accesses are renumbered when numbers run out.

    An interrupted call leaves the structures inconsistent; the caller then discards the stack.
    """

    def __init__(self, limit: i64) -> None:
        self.limit: i64 = limit
        self.blocks: dict[bytes, SampledBlock] = {}
        self._num_slots: i64 = 2 * limit + 2
        self.next_number: i64 = 0  # the number of the next access
        self.oldest: i64 = 0
        # By the number of an access: its block that is deepest in the chain.
        self._deepest: list[SampledBlock | None] = [None] * (2 * limit + 2)
        self._tree: list[int] = [0] * (2 * limit + 3)  # a Fenwick tree: blocks per access

    def count_above(self, number: i64) -> i64:
        """Return the number of blocks of accesses after `number`. O(log limit)."""
        count: i64 = len(self.blocks)
        tree = self._tree
        index: i64 = number + 1
        while index > 0:
            count -= tree[index]
            index &= index - 1
        return count

    def rank_chain(self, last: SampledBlock, num_blocks: i64) -> list[int]:
        """Return the ranks, from 1, of `last` and the blocks before it in its chain, `num_blocks` in all."""
        ranks: list[int] = []
        block: SampledBlock | None = last
        while block is not None and len(ranks) < num_blocks:
            number = block.number
            first = block
            size: i64 = 1
            parent = first.parent
            while parent is not None and parent.number == number:
                first = parent
                size += 1
                parent = first.parent
            rank = self.count_above(number) + size
            while size > 0 and len(ranks) < num_blocks:
                ranks.append(rank)
                rank -= 1
                size -= 1
            block = parent
        return ranks

    def access(self, last: SampledBlock) -> None:
        """Move `last` and the blocks before it in its chain to the top. O(blocks + stretches * log limit)."""
        if last.number == self.next_number - 1 and self._deepest[last.number] is last:
            return  # so are the blocks before it, which are never used less recently
        if self.next_number == self._num_slots:
            self._renumber()
        new: i64 = self.next_number
        self.next_number = new + 1
        total: i64 = 0
        block: SampledBlock | None = last
        while block is not None:
            number = block.number
            if self._deepest[number] is block:
                self._deepest[number] = None
            size: i64 = 0
            while block is not None and block.number == number:
                block.number = new
                size += 1
                block = block.parent
            self._add(number, -size)
            total += size
        self._deepest[new] = last
        self._add(new, total)

    def append(self, parent: SampledBlock | None, key: bytes, replica: i64) -> SampledBlock | None:
        """Add a block behind `parent`, the deepest block of its access, as part of that access.

        Args:
            parent: None for an access of its own.
        Returns:
            The deepest sampled block of the chain: the new one, or `parent` if the stack is full and the new
            one would be the least recently used.
        """
        if parent is None:
            if self.next_number == self._num_slots:
                self._renumber()
            number: i64 = self.next_number
            self.next_number = number + 1
        else:
            number = parent.number
        block = SampledBlock(key, parent, number, replica)
        self.blocks[key] = block
        self._deepest[number] = block
        self._add(number, 1)
        if len(self.blocks) > self.limit and self._drop_last() is block:
            return parent
        return block

    def is_open(self, block: SampledBlock, max_above: i64) -> bool:
        """Return True if the block is the deepest of its access, with at most `max_above` blocks above it."""
        return self._deepest[block.number] is block and self.count_above(block.number) <= max_above

    def get_deepest(self, number: i64) -> SampledBlock | None:
        """Return the block of this access that is deepest in its chain, or None if it has none any more."""
        return self._deepest[number]

    def _drop_last(self) -> SampledBlock:
        """Drop the least recently used block, and return it."""
        block = self._deepest[self.oldest]
        while block is None:
            self.oldest += 1
            block = self._deepest[self.oldest]
        parent = block.parent
        number = block.number
        self._deepest[number] = parent if parent is not None and parent.number == number else None
        self._add(number, -1)
        del self.blocks[block.key]
        return block

    def _add(self, number: i64, num_blocks: i64) -> None:
        tree = self._tree
        index: i64 = number + 1
        size: i64 = len(tree)
        while index < size:
            tree[index] += num_blocks
            index += index & -index

    def _renumber(self) -> None:
        """Number the accesses that have blocks from 0. O(limit * log limit)."""
        numbers: list[int] = []
        deepest: list[SampledBlock | None] = []
        for block in self._deepest:
            numbers.append(len(deepest))
            if block is not None:
                deepest.append(block)
        self.next_number = len(deepest)
        deepest += [None] * (self._num_slots - len(deepest))
        self._deepest = deepest
        self._tree = [0] * (self._num_slots + 1)
        for listed in self.blocks.values():
            listed.number = numbers[listed.number]
            self._add(listed.number, 1)
        self.oldest = 0
