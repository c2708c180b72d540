"""The ages of the ids of a pool, and `OldestRuns`, which searches them for runs with old content.

An age says whether the block is free, whether it has content, and when that was last used:

    0       in use, or the null block
    1       free and empty: no request can hit it
    2..254  free with content; larger = used later
    255     free, in a band above the default one: reused after all others
"""

from typing import Final, cast

from mypy_extensions import i64

from kv_pool.contiguous.buddy import find_youngest
from kv_pool.core.block import COMPILED
from kv_pool.ids import BlockId

IN_USE: Final = 0
EMPTY: Final = 1
YOUNGEST: Final = 254
RETAINED: Final = 255

ANY_AGE: Final = bytes([IN_USE]) + bytes([EMPTY]) * 255
"""Translation table from age to 1 for free, 0 for in use."""
_ORDINARY_AGE: Final = ANY_AGE[:RETAINED] + bytes([IN_USE])
"""Like `ANY_AGE`, but also 0 for retained blocks."""
_RETAINED_IN_USE: Final = bytes(range(RETAINED)) + bytes([IN_USE])
"""Translation table that gives retained blocks the age of blocks in use."""

_MIN_PIECE: Final = 8
# Bounds of one search, in bytes; benchmarks/bench_runs.py measures their cost and success rate.
_MAX_SWEEP: Final = 4_096
_SWEEP_WINDOW: Final = 128
MAX_SCAN: Final = 65_536
_MAX_SCANS: Final = 2
_MAX_PLACES: Final = 16


def find_first_fit(num_blocks: int, ages: bytearray, max_age: int) -> BlockId:
    """Return the lowest id of `num_blocks` consecutive free ids, no age above `max_age`; 0 for none."""
    is_free = ages.translate(_ORDINARY_AGE if max_age < RETAINED else ANY_AGE)
    return cast(BlockId, max(0, is_free.find(ANY_AGE[1:2] * num_blocks)))


class OldestRuns:
    """Searches of the ids in a circle, from the end of the last search onwards.

    The hand moves through the ids like a clock's: blocks taken together come up together again, with the same
    age as their neighbours, so that both runs and the eviction order last.

    Attributes:
        hand: the id where the next search begins.
    """

    def __init__(self) -> None:
        self.hand: i64 = 1

    def find_run(self, num_blocks: int, ages: bytearray, good_age: int, max_age: int) -> BlockId:
        """Find the place of a run whose youngest block was used longest ago, among the first 16 places.

        A place with no age above `good_age` ends the search. In each free run it tries the multiples of the
        next power of two, so that the rest of the run stays whole, and both ends; the first of equally old
        places wins. A call scans at most 131,072 ids, and the next call continues from there: in a larger
        pool 0 does not prove that there is no run.

        Args:
            max_age: `YOUNGEST` for no retained block, `RETAINED` for all.
        Returns:
            The first id; 0 for none.
        """
        n: i64 = num_blocks
        num_all: i64 = len(ages)
        is_whole: bool = num_all <= _MAX_SCANS * MAX_SCAN
        # If the loop below is not compiled, methods of bytes detect faster that there is no run.
        if not COMPILED and is_whole and ANY_AGE[1:2] * num_blocks not in ages.translate(ANY_AGE):
            return cast(BlockId, 0)
        slot: i64 = 1
        while slot < n:
            slot *= 2
        good: i64 = good_age
        best: i64 = 0
        best_age: i64 = RETAINED + 1
        num_places: i64 = 0
        at = self.hand if self.hand < num_all else 1
        left: i64 = min(num_all + n - 2, _MAX_SCANS * MAX_SCAN)
        while left > 0 and num_places < _MAX_PLACES and best_age > good:
            data = bytes(ages[at : at + min(left, MAX_SCAN)])
            if max_age < RETAINED and RETAINED in data:
                data = data.translate(_RETAINED_IN_USE)
            size: i64 = len(data)
            last: i64 = n - 1
            while last < size and num_places < _MAX_PLACES and best_age > good:
                # Backwards from where a run would end: ids before the last one in use are skipped.
                low: i64 = last - n
                position: i64 = last
                while position > low and data[position] != IN_USE:
                    position -= 1
                if position > low:
                    last = position + n
                    continue
                first: i64 = low + 1
                end: i64 = data.find(IN_USE, last)
                if end < 0:
                    end = size
                place: i64 = first + (slot - (at + first) % slot) % slot
                turn: i64 = 0
                if place + n > end:
                    place = first
                    turn = 1
                while turn < 3 and num_places < _MAX_PLACES and best_age > good:
                    age: i64 = find_youngest(data, place, place + n, best_age)
                    if age < best_age:
                        best = at + place
                        best_age = age
                    if age < RETAINED:
                        num_places += 1
                    if turn == 0 and place + slot + n <= end:
                        place += slot
                    else:
                        turn += 1
                        place = first if turn == 1 else end - n
                last = end + n
            left -= size
            if at + size >= num_all:
                at = 1
            else:  # a run may begin in this part of the ids and end in the next one
                at += max(1, size - n + 1)
                if left > 0:
                    left += n - 1
        if best:
            self.hand = best + n
        elif not is_whole:
            self.hand = at
        return cast(BlockId, best)

    def find_pieces(self, num_blocks: int, ages: bytearray, max_age: int) -> list[tuple[int, int]]:
        """Find long pieces of free ids, no age above `max_age`.

        Returns:
            The pieces as (first id, end), together at most `num_blocks` ids, or none. Each has at least 8
            ids, except the last one if fewer are needed.
        Cost: O(num_blocks), within a fixed number of bytes.
        """
        pieces: list[tuple[int, int]] = []
        limit: i64 = max_age
        num_all: i64 = len(ages)
        need: i64 = num_blocks
        at = self.hand
        left: i64 = min(max(_MAX_SWEEP, 32 * need), num_all - 1)
        while need > 0 and left > 0:
            if at >= num_all:
                at = 1
            data = bytes(ages[at : at + min(left, max(2 * need, _SWEEP_WINDOW))])
            size: i64 = len(data)
            position: i64 = 0
            while need > 0 and position < size:
                while position < size and (data[position] == IN_USE or data[position] > limit):
                    position += 1
                start: i64 = position
                end: i64 = min(size, start + need)
                while position < end and data[position] != IN_USE and data[position] <= limit:
                    position += 1
                length: i64 = position - start
                if position == size and start > 0 and length < need and at + size < num_all:
                    position = start  # the piece may continue in the next window
                    break
                if length > 0 and length >= min(need, _MIN_PIECE):
                    pieces.append((at + start, at + position))
                    need -= length
            at += position
            left -= position
        self.hand = at
        return pieces
