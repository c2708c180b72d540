"""`FreeAges`: the age byte of each block of a pool, kept in step with what is taken and freed."""

from collections.abc import Sequence
from typing import Any, Final

from mypy_extensions import i64

from kv_pool.contiguous.ages import EMPTY, IN_USE, KEPT, YOUNGEST
from kv_pool.contiguous.buddy import BuddySystem
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.eviction_order import DEFAULT_BAND, EMPTY_BAND

# Rows of one age: a bytearray takes a slice of another three times as fast as one of bytes.
_ROW_BY_AGE: Final = [bytearray([age]) for age in range(256)]
_IN_USE_ROWS: Final = [bytearray(length) for length in range(65)]
ANY_AGE: Final = bytes([IN_USE]) + bytes([EMPTY]) * 255
"""Translates ages to whether a block is free."""

GENERATIONS: Final = 64
"""Generations per turnover of the free blocks, which leaves room for four turnovers in a byte."""

# At least so large a part of the pool is one generation, so that moving ages down stays rare when little is
# free.
_MAX_GENERATIONS: Final = 4_096


class FreeAges:
    """Which ids are free and how long ago each was used; `FreeRunIndex` searches it.

        ages:  0  0  1  1  9  9  9  0  0  30
        id:    0  1  2  3  4  5  6  7  8  9       see `ages.py`

    An age is a generation: a sixty-fourth of the free blocks was given back with content between one and the
    next, where few are free a single block. Ages that would pass 254 are moved down; what is older than two
    turnovers counts as equally old then.

    Derived from the free queue, which owns freeness: `rebuild` makes it anew. `RunBlockPool` notes every
    change here, in batches, since a run is one store whatever its length.

    Attributes:
        is_stale: it was found to be wrong, and has to be rebuilt before it is asked again.
        buddies: the aligned chunks of what is free; None until the first search that needs them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.is_stale = False
        self.ages: bytearray = bytearray(num_blocks)
        self.now: i64 = EMPTY + 1
        self._width: i64 = 1
        self._num_in_generation: i64 = 0
        self._hand: i64 = 1  # where the next sweep or search begins
        self.buddies: BuddySystem | None = None

    def rebuild(self, num_blocks: int, free: Sequence[KVCacheBlock], has_content: Sequence[bool]) -> None:
        """Rebuild the index from the free blocks; their ages follow from the eviction order. O(num_blocks).

        The caller clears `is_stale`.
        """
        self.ages = bytearray(num_blocks)
        if self.buddies is not None:
            self.buddies.note_all_changed()
        self._set_width(len(free))
        self._num_in_generation = 0
        num_left: i64 = sum(has_content)
        self.now = EMPTY + 2 + num_left // self._width
        for position, block in enumerate(free):
            age: i64 = EMPTY
            if has_content[position]:
                age = self.now - 1 - num_left // self._width
                age = max(EMPTY + 1, age)
                num_left -= 1
            self.ages[block.block_id] = age
        if self._hand >= num_blocks:
            self._hand = 1

    def note_taken(self, blocks: list[KVCacheBlock], owner: Any) -> None:
        """These blocks are in use; those of another owner are passed over."""
        first: i64 = 0
        end: i64 = 0
        for block in blocks:
            if block.owner is not owner:
                continue
            block_id: int = block.block_id  # 32 bits; an int goes with 64
            if block_id == end:
                end += 1
            elif block_id == first - 1:
                first -= 1
            else:
                if end > first:
                    self._store(first, end, IN_USE)
                first = block_id
                end = block_id + 1
        if end > first:
            self._store(first, end, IN_USE)

    def note_range_taken(self, first: int, end: int) -> None:
        """The blocks `[first, end)` are in use."""
        self._store(first, end, IN_USE)

    def note_freed(
        self,
        blocks: list[KVCacheBlock],
        owner: Any,
        num_free_blocks: int,
        keeps_hashes: bool,
        keeps_all: bool,
    ) -> None:
        """Those of these blocks that nobody holds any more are free.

        Args:
            num_free_blocks: in the whole pool by now.
            keeps_hashes: a block with a hash has content; otherwise none has.
            keeps_all: one without a hash has content, too.
        """
        now = self.now
        first: i64 = 0
        end: i64 = 0
        age: i64 = EMPTY
        num_kept: i64 = 0
        for block in blocks:
            if block.ref_cnt != 0 or block.owner is not owner or block.is_null:
                continue
            block_id: int = block.block_id  # 32 bits; an int goes with 64
            block_age: i64 = EMPTY
            if keeps_all or (keeps_hashes and block.key is not None):
                block_age = now
                num_kept += 1
            if block_age == age and block_id == first - 1:
                first -= 1
            elif block_age == age and block_id == end:
                end += 1
            else:
                if end > first:
                    self._store(first, end, age)
                first = block_id
                end = block_id + 1
                age = block_age
        if end > first:
            self._store(first, end, age)
        self._num_in_generation += num_kept
        if self._num_in_generation >= self._width:
            self.now += self._num_in_generation // self._width
            self._num_in_generation %= self._width
            self._set_width(num_free_blocks)
            if self.now > YOUNGEST:
                self._renumber()

    def note_moved(self, blocks: list[KVCacheBlock], age: int) -> None:
        """These free blocks have changed their band. Those without content stay empty."""
        for block in blocks:
            self.ages[block.block_id] = EMPTY if block.key is None else age

    def note_emptied(self, block_id: int) -> None:
        """The block has lost its content; if it is free, it stays free."""
        if self.ages[block_id] != IN_USE:
            self.ages[block_id] = EMPTY

    def note_all_emptied(self) -> None:
        """All blocks have lost their content."""
        self.ages = self.ages.translate(ANY_AGE)

    def swap(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The two blocks of each pair have exchanged their ids."""
        ages = self.ages
        for first_id, second_id in pairs:
            age = ages[first_id]
            ages[first_id] = ages[second_id]
            ages[second_id] = age
            if self.buddies is not None:
                self.buddies.note_changed(first_id, first_id + 1)
                self.buddies.note_changed(second_id, second_id + 1)

    def resize(self, num_blocks: int) -> None:
        """The pool has so many blocks now; new ones are free and empty. Those cut off must have been free."""
        ages = self.ages
        if num_blocks > len(ages):
            ages.extend(bytes([EMPTY]) * (num_blocks - len(ages)))
        else:
            del ages[num_blocks:]
        if self.buddies is not None:
            self.buddies.note_all_changed()
        self._hand = 1

    def _store(self, first: i64, end: i64, age: i64) -> None:
        length: i64 = end - first
        if self.buddies is not None:
            self.buddies.note_changed(first, end)
        if length == 1:
            self.ages[first] = age
        elif age == IN_USE and length <= 64:
            self.ages[first:end] = _IN_USE_ROWS[length]
        else:
            self.ages[first:end] = _ROW_BY_AGE[age] * length

    def _set_width(self, num_free_blocks: i64) -> None:
        self._width = max(1, num_free_blocks // GENERATIONS, len(self.ages) // _MAX_GENERATIONS)

    def _renumber(self) -> None:
        """Move all ages down by half their range, or more if a batch was large; the oldest become one."""
        down = self.now - 2 * GENERATIONS
        table = bytearray(range(256))
        for age in range(EMPTY + 1, KEPT):
            table[age] = max(EMPTY + 1, age - down)
        self.ages = self.ages.translate(table)
        self.now = 2 * GENERATIONS


def note_moved(index: FreeAges, blocks: list[KVCacheBlock], band: int) -> None:
    """Give free blocks the age of the band to which they were moved."""
    if band == DEFAULT_BAND:
        index.note_moved(blocks, index.now)
    elif band < DEFAULT_BAND:
        index.note_moved(blocks, EMPTY if band == EMPTY_BAND else EMPTY + 1)
    else:
        index.note_moved(blocks, KEPT)
