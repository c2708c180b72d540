"""`Ghosts`: the keys of evicted runs, first in, first out, bounded by blocks."""

from collections import OrderedDict
from typing import Any

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Ghosts:
    """The keys of runs that were evicted last, each with its number of blocks.

    A key stays where it is if it is added again. The oldest keys are dropped beyond `max_blocks`.

    Attributes:
        num_blocks: number of blocks of the keys.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks: int = max_blocks
        self.num_blocks: int = 0
        # A dict would search for its oldest key among those that were removed.
        self._sizes: OrderedDict[Any, int] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._sizes)

    def add(self, key: Any, num_blocks: int) -> list[Any]:
        """Add a key, with at most `max_blocks` blocks. Return the keys that were dropped. O(1), amortised."""
        num_blocks = min(num_blocks, self.max_blocks)
        self.num_blocks += num_blocks - self._sizes.get(key, 0)
        self._sizes[key] = num_blocks
        dropped: list[Any] = []
        while self.num_blocks > self.max_blocks:
            dropped.append(self.drop_oldest())
        return dropped

    def pop(self, key: Any) -> int:
        """Remove a key. Return its number of blocks; 0 if it is not there."""
        num_blocks = self._sizes.pop(key, 0)
        self.num_blocks -= num_blocks
        return num_blocks

    def shrink(self, num_blocks: int) -> None:
        """Drop the oldest keys until at most `num_blocks` blocks are left."""
        while self.num_blocks > num_blocks and self._sizes:
            self.drop_oldest()

    def drop_oldest(self) -> Any:
        """Remove and return the oldest key; None if there is none."""
        if not self._sizes:
            return None
        key, num_blocks = self._sizes.popitem(last=False)
        self.num_blocks -= num_blocks
        return key
