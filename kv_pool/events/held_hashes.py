"""`HeldHashes`: the hashes at one place, each with a value and a number of copies. Compiled.

It is the one index of a stream. A `StreamState` keeps one for each group and medium of its pool, and a
`PrefixMirror` one for each group and medium of each publisher.
"""

from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from typing import Any, Final

from kv_pool.ids import ExternalBlockHash

ABSENT: Final[Any] = object()
"""The value of a hash that was not held, in the answer of `HeldHashes.remove`."""


class HeldHashes:
    """The hashes at one place.

    `values` is one dict, for bulk calls: with a million blocks, growing it blocks other threads for some
    milliseconds, as growing the pool's own map does.

    Attributes:
        values: hash -> its value.
        copies: hash -> number of blocks beyond the first that carry it, if any.
    """

    __slots__ = ("copies", "values")

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}
        self.copies: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[tuple[ExternalBlockHash, int]]:
        """Yield each hash and the number of blocks that carry it."""
        for block_hash in self.values:
            yield block_hash, 1 + self.copies.get(block_hash, 0)

    def store(self, hashes: Any, values: Iterable[Any], counts_copies: bool = True) -> list[int] | None:
        """Add one copy of each hash. O(hashes).

        Args:
            hashes: a sequence; a hash may occur several times.
            values: at least one per hash, for those that had no copy before.
            counts_copies: whether a hash that is held gets another copy.
        Returns:
            The positions of hashes that had no copy before; None if this is all of them.
        """
        held = self.values
        num_before = len(held)
        if len(hashes) == 1:
            for value in values:
                held.setdefault(hashes[0], value)
                break
        else:
            list(map(held.setdefault, hashes, values))  # one lookup per hash: with many, each is a cache miss
        num_new = len(held) - num_before
        if num_new == len(hashes):
            return None
        new: set[Any] = set(islice(reversed(held), num_new))
        positions: list[int] = []
        position = -1
        for block_hash in hashes:
            position += 1
            if block_hash in new:
                new.remove(block_hash)
                positions.append(position)
            elif counts_copies:
                self.copies[block_hash] = self.copies.get(block_hash, 0) + 1
        return positions

    def remove(self, hashes: Any) -> tuple[list[Any], list[Any]]:
        """Remove one copy of each hash; a hash may occur several times. O(hashes).

        Returns:
            The hashes that are not held afterwards, and for each its value, or `ABSENT` if it was not held.
        """
        copies = self.copies
        gone = hashes
        if copies and not copies.keys().isdisjoint(hashes):
            gone = []
            for block_hash in hashes:
                num_copies = copies.get(block_hash, 0)
                if num_copies == 0:
                    gone.append(block_hash)
                elif num_copies == 1:
                    del copies[block_hash]
                else:
                    copies[block_hash] = num_copies - 1
        if len(gone) == 1:
            return gone, [self.values.pop(gone[0], ABSENT)]
        return gone, list(map(self.values.pop, gone, repeat(ABSENT)))
