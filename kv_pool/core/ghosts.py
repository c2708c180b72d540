"""`Ghosts`: the keys of evicted runs, first in, first out, bounded by blocks."""

from typing import Any, Final

from mypy_extensions import mypyc_attr

_REMOVED: Final = -1


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
        # A dict alone would search for its oldest key among those that were removed. `_keys` and `_sizes` are
        # in the order of insertion, with removed entries; `_places` has the indices, plus `_num_cut`.
        self._places: dict[Any, int] = {}
        self._keys: list[Any] = []
        self._sizes: list[int] = []
        self._head: int = 0  # the index of the oldest entry
        self._num_cut: int = 0  # number of entries that were cut off in front of the lists

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._places)

    def add(self, key: Any, num_blocks: int) -> list[Any]:
        """Add a key, with at most `max_blocks` blocks. Return the keys that were dropped. O(1), amortised."""
        num_blocks = min(num_blocks, self.max_blocks)
        place = self._places.get(key, -1)
        if place < 0:
            if len(self._keys) > 2 * len(self._places) + 16:
                self._compact()
            self._places[key] = self._num_cut + len(self._keys)
            self._keys.append(key)
            self._sizes.append(num_blocks)
            self.num_blocks += num_blocks
        else:
            index = place - self._num_cut
            self.num_blocks += num_blocks - self._sizes[index]
            self._sizes[index] = num_blocks
        dropped: list[Any] = []
        while self.num_blocks > self.max_blocks:
            dropped.append(self.drop_oldest())
        return dropped

    def pop(self, key: Any) -> int:
        """Remove a key. Return its number of blocks; 0 if it is not there."""
        place = self._places.pop(key, -1)
        if place < 0:
            return 0
        index = place - self._num_cut
        num_blocks = self._sizes[index]
        self._sizes[index] = _REMOVED
        self._keys[index] = None
        self.num_blocks -= num_blocks
        return num_blocks

    def shrink(self, num_blocks: int) -> None:
        """Drop the oldest keys until at most `num_blocks` blocks are left."""
        while self.num_blocks > num_blocks and self._places:
            self.drop_oldest()

    def drop_oldest(self) -> Any:
        """Remove and return the oldest key; None if there is none."""
        if not self._places:
            return None
        while self._sizes[self._head] == _REMOVED:
            self._head += 1
        key = self._keys[self._head]
        self.pop(key)
        self._head += 1
        return key

    def _compact(self) -> None:
        """Drop the removed entries from the lists. O(entries), after as many removals."""
        num_front = self._head
        is_dense = len(self._keys) - num_front == len(self._places)
        if is_dense:  # none but those in front
            del self._keys[:num_front], self._sizes[:num_front]
            self._num_cut += num_front
        else:
            left = [index for index, size in enumerate(self._sizes) if size != _REMOVED]
            self._keys = [self._keys[index] for index in left]
            self._sizes = [self._sizes[index] for index in left]
            self._num_cut = 0
            for index, key in enumerate(self._keys):
                self._places[key] = index
        self._head = 0
