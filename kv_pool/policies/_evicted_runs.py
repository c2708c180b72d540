"""`EvictedRuns`: when evicted runs were freed, in 29 bytes each."""

from array import array
from typing import Any, Final

NUM_WAYS: Final = 4
_MULTIPLIER: Final = 0x1E3779B97F4A7C15
_MASK: Final = (1 << 61) - 1

EvictedRun = tuple[int, float, int, int]
"""The stamp, time and class of an evicted run, and its number of blocks."""


class EvictedRuns:
    """The stamps, times and classes of evicted runs by key, in a table of fixed size.

    A key has four places. If none is empty, the run with the lowest stamp there is forgotten.
    """

    def __init__(self, num_runs: int) -> None:
        num_sets = 1
        while num_sets * NUM_WAYS < num_runs:
            num_sets *= 2
        self.num_sets: int = num_sets
        num_places = num_sets * NUM_WAYS
        self.keys: Any = array("q", bytes(8 * num_places))
        self.stamps: Any = array("q", bytes(8 * num_places))
        self.times: Any = array("d", bytes(8 * num_places))
        self.sizes: Any = array("i", bytes(4 * num_places))
        self.kinds: bytearray = bytearray(num_places)

    def add(self, key: Any, stamp: int, time: float, kind: int, num_blocks: int) -> EvictedRun | None:
        """Remember an evicted run. Return the one that is forgotten for it, if any. O(1)."""
        number = _number_key(key)
        first = self._find_set(number)
        place = first
        for other in range(first, first + NUM_WAYS):
            if self.sizes[other] == 0:
                place = other
                break
            if self.stamps[other] < self.stamps[place]:
                place = other
        forgotten = self._remove(place)
        self.keys[place] = number
        self.stamps[place] = stamp
        self.times[place] = time
        self.sizes[place] = num_blocks
        self.kinds[place] = kind
        return forgotten

    def pop(self, key: Any) -> EvictedRun | None:
        """Remove a run and return it; None if it is not there. O(1)."""
        number = _number_key(key)
        first = self._find_set(number)
        for place in range(first, first + NUM_WAYS):
            if self.keys[place] == number and self.sizes[place] != 0:
                return self._remove(place)
        return None

    def _remove(self, place: int) -> EvictedRun | None:
        num_blocks = self.sizes[place]
        if num_blocks == 0:
            return None
        self.sizes[place] = 0
        return self.stamps[place], self.times[place], self.kinds[place], num_blocks

    def _find_set(self, number: int) -> int:
        return (number * _MULTIPLIER >> 40) % self.num_sets * NUM_WAYS


def _number_key(key: bytes | None) -> int:
    """Return 61 bits of a key's hash."""
    return 0 if key is None else int.from_bytes(key[-12:-4], "big") & _MASK
