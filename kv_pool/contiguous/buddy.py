"""`BuddySystem`: the free ids of a pool as aligned power-of-two chunks that split and merge.

    ids     0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
    free    .  1  .  .  4  5  6  7  .  .  .  .  12 13 14 .
    chunks     0        |--- 2 --|              |1 | 0            the order of each: 2 ** order ids

A chunk of order k begins at a multiple of 2 ** k. Its buddy is the chunk at `first ^ 2 ** k`; two free
buddies merge into one chunk of the next order. Knowlton, A fast storage allocator, CACM 8 (1965).
"""

from typing import Final, cast

from mypy_extensions import i64

from kv_pool.ids import BlockId

_MAX_PLACES: Final = 16
"""Maximum number of chunks of one order that a search compares."""

_MARKS: Final = [bytes([order + 1]) for order in range(64)]
_INSIDE: Final = 255
_INSIDE_ROW: Final = bytes([_INSIDE])

_MIN_CHANGES: Final = 256
"""A pool of any size records at least this many changes before it rebuilds all chunks instead."""


class BuddySystem:
    """The chunks of the free ids of a pool.

    Derived from the ages of a `FreeRunIndex`, of which 0 stands for an id in use; it notes each range of ids
    that changes. `update` applies the pending splits and merges before a search, so a pool pays for them only
    when a caller requests a run.

    Attributes:
        counts: number of chunks of each order, from 0; up to date after `update`.
    """

    def __init__(self) -> None:
        self.counts: list[int] = []
        # 1 + the order of the chunk that begins here; _INSIDE within a chunk; 0 outside all chunks.
        self._order_at: bytearray = bytearray()
        self._changed: list[int] = []
        self._is_stale: bool = True

    # ---- changes ---------------------------------------------------------------------------------

    def note_changed(self, first: i64, end: i64) -> None:
        """Record that the ids `[first, end)` were taken or freed, or that their ages changed."""
        if not self._is_stale:
            self._changed.append(first)
            self._changed.append(end)
            if len(self._changed) > _MIN_CHANGES + len(self._order_at) // 8:
                self.note_all_changed()

    def note_all_changed(self) -> None:
        """Record that any id may have changed, and also the number of ids."""
        self._is_stale = True
        self._changed.clear()

    def update(self, ages: bytearray) -> None:
        """Split and merge chunks until they match the free ids.

        Cost: O(changed ids), plus O(log(pool size)) per changed range; O(pool) after `note_all_changed`.
        """
        changed = self._changed
        if self._is_stale or len(ages) != len(self._order_at):
            changed.clear()
            self._order_at = bytearray(len(ages))
            self.counts = [0] * len(ages).bit_length()
            self._free(ages, 0, len(ages))
            self._is_stale = False
        position: i64 = 0
        while position < len(changed):
            first: i64 = changed[position]
            end: i64 = changed[position + 1]
            self._take(first, end)
            self._free(ages, first, end)
            position += 2
        changed.clear()

    def _free(self, ages: bytearray, first: i64, end: i64) -> None:
        """Make chunks of the free ids in `[first, end)`, which are in no chunk yet, and merge them."""
        data = bytes(ages[first:end])  # compiled code reads bytes faster
        size: i64 = len(data)
        at: i64 = 0
        while at < size:
            if data[at] == 0:
                at += 1
                continue
            start: i64 = at
            stop: i64 = data.find(0, at)
            at = size if stop < 0 else stop
            self._order_at[first + start : first + at] = _INSIDE_ROW * (at - start)
            self._cut(first + start, first + at)

    def _cut(self, first: i64, end: i64) -> None:
        """Divide `[first, end)`, marked as inside a chunk, into the largest possible chunks."""
        while first < end:
            order: i64 = 0
            size: i64 = 1
            while first % (2 * size) == 0 and first + 2 * size <= end:
                size *= 2
                order += 1
            self._put(first, order)
            first += size

    def _put(self, first: i64, order: i64) -> None:
        """Add a chunk, and merge it with its buddy as long as the buddy is free."""
        order_at = self._order_at
        num_all: i64 = len(order_at)
        while True:
            size: i64 = 1 << order
            buddy: i64 = first ^ size
            if buddy >= num_all or order_at[buddy] != order + 1:
                break
            order_at[buddy] = _INSIDE
            self.counts[order] -= 1
            first = min(first, buddy)
            order += 1
        order_at[first] = order + 1
        self.counts[order] += 1

    def _take(self, first: i64, end: i64) -> None:
        """Remove the ids `[first, end)` from their chunks, and split off the rest of these chunks."""
        order_at = self._order_at
        data = bytes(order_at[first:end])  # what follows changes no further chunk of the range
        at: i64 = first
        while at < end:
            mark: i64 = data[at - first]
            if mark == 0:
                at += 1
                continue
            start: i64 = at
            order: i64 = mark - 1
            if mark == _INSIDE:  # the chunk begins before the range
                order = 0
                while order_at[start] != order + 1:
                    order += 1
                    start = at - at % (1 << order)
            stop: i64 = min(start + (1 << order), end)
            self.counts[order] -= 1
            order_at[start] = _INSIDE
            order_at[at:stop] = bytes(stop - at)
            self._cut(start, at)
            self._cut(stop, start + (1 << order))
            at = stop

    # ---- queries ---------------------------------------------------------------------------------

    def find_run(self, num_blocks: int, ages: bytearray, good_age: int, max_age: int) -> BlockId:
        """Find a place for a run, at a multiple of the next power of two; the rest of its chunk stays free.

        Prefers the smallest sufficient chunk whose content is no younger than `good_age`; else the place
        whose youngest content is oldest, if no younger than `max_age`. Ties go to the lowest id.

        Returns:
            The first id; 0 for none.
        """
        self.update(ages)
        n: i64 = num_blocks
        good: i64 = good_age
        order: i64 = 0
        size: i64 = 1
        while size < n:
            size *= 2
            order += 1
        best: i64 = 0
        best_age: i64 = max_age + 1
        order_at = self._order_at
        while order < len(self.counts):
            num_places: i64 = 0
            chunk: i64 = order_at.find(_MARKS[order]) if self.counts[order] else -1
            while chunk >= 0 and num_places < _MAX_PLACES:
                start: i64 = chunk
                end: i64 = start + (1 << order)
                while start < end and num_places < _MAX_PLACES:
                    num_places += 1
                    age: i64 = ages[start]
                    if n > 1:
                        age = find_youngest(bytes(ages[start : start + n]), 0, n, best_age)
                    if age < best_age:
                        best = start
                        best_age = age
                        if age <= good:
                            return cast(BlockId, best)
                    start += size
                chunk = order_at.find(_MARKS[order], end)
            order += 1
        return cast(BlockId, best)

    def find_pieces(self, num_blocks: int, ages: bytearray, max_age: int) -> list[tuple[int, int]]:
        """Find chunks for blocks that need not form one run, such as 8 + 4 + 1 for 13, each the smallest.

        Returns:
            Their ids as (first id, end), together at most `num_blocks`; fewer if the remaining blocks are
            younger than `max_age`. They are in no chunk any more: mark them as in use.
        """
        pieces: list[tuple[int, int]] = []
        need: i64 = num_blocks
        size: i64 = 1
        while size * 2 <= need:
            size *= 2
        while need > 0:
            first: i64 = self.find_run(size, ages, max_age, max_age)
            if first > 0:
                self._take(first, first + size)
                pieces.append((first, first + size))
                need -= size
            elif size == 1:
                break
            else:
                size //= 2
            while size > max(1, need):
                size //= 2
        return pieces

    def list_chunks(self, ages: bytearray) -> list[tuple[BlockId, int]]:
        """Return the chunks as (first id, order), by id."""
        self.update(ages)
        order_at = self._order_at
        return [
            (cast(BlockId, first), order_at[first] - 1)
            for first in range(len(order_at))
            if 0 < order_at[first] < _INSIDE
        ]


def find_youngest(ages: bytes, first: i64, end: i64, limit: i64) -> i64:
    """Return the largest of the ages `[first, end)`; stop at the first age of `limit` or above."""
    youngest: i64 = 0
    at: i64 = first
    while at < end and youngest < limit:
        age: i64 = ages[at]
        if age > youngest:
            youngest = age
        at += 1
    return youngest
