"""`FreeAges`: the age byte of each block of a pool, updated when blocks are taken and freed.

An age says whether the block is free, whether it has content, and when that was last used:

    0       in use, or the null block
    1       free and empty: no request can hit it
    2..254  free with content; larger = used later
    255     free, in a band above the default one: reused after all others
"""

from collections.abc import Sequence
from typing import Any, Final

from mypy_extensions import i64

from kv_pool.contiguous.buddy import BuddySystem
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.eviction_order import DEFAULT_BAND, EMPTY_BAND
from kv_pool.core.pool_part import FreeIndex
from kv_pool.core.pool_state import PoolState
from kv_pool.ids import BlockId

IN_USE: Final = 0
EMPTY: Final = 1
YOUNGEST: Final = 254
RETAINED: Final = 255

# Rows of one age: assigning a slice to a bytearray is three times as fast from a bytearray as from bytes.
_ROW_BY_AGE: Final = [bytearray([age]) for age in range(256)]
_IN_USE_ROWS: Final = [bytearray(length) for length in range(65)]
ANY_AGE: Final = bytes([IN_USE]) + bytes([EMPTY]) * 255
"""Translation table from age to 1 for free, 0 for in use."""

GENERATIONS: Final = 64
"""Generations per turnover of the free blocks; a byte can distinguish almost four turnovers."""

# A generation is at least 1 / _MAX_GENERATIONS of the pool, so that renumbering stays rare when few blocks
# are free.
_MAX_GENERATIONS: Final = 4_096


class FreeAges(FreeIndex):
    """The age of each id: free or not, and how long ago it was used. `FreeRunIndex` searches it.

        ages:  0  0  1  1  9  9  9  0  0  30
        id:    0  1  2  3  4  5  6  7  8  9

    An age is a generation. A generation ends when 1/64 of the free blocks were freed with content, or a
    single block if few are free. When ages would exceed 254 they are renumbered; then all blocks older than
    two turnovers have the same age.

    Derived from the free queue, which decides which blocks are free; `rebuild` restores it. `RunBlockPool`
    notes changes in batches, since a run takes one store whatever its length.

    Attributes:
        buddies: the aligned chunks of the free ids; None until the first search that needs them.
        counted_length, num_runs, num_free: the run length for which `num_runs` and `num_free` are kept, see
            `count_runs`, or 0; the number of disjoint runs of it, or -1 if it has to be counted again; the
            number of free ids.
    """

    def __init__(self, num_blocks: int) -> None:
        self.ages: bytearray = bytearray(num_blocks)
        self._owner: Any = None
        self._keeps_hashes: bool = True  # freed blocks with a hash have content
        self.now: i64 = EMPTY + 1
        self._width: i64 = 1
        self._num_in_generation: i64 = 0
        self._hand: i64 = 1  # the id where the next sweep or search begins
        self.buddies: BuddySystem | None = None
        self.counted_length: i64 = 0
        self.num_runs: i64 = -1
        self.num_free: i64 = 0

    def count_runs(self, run_length: int) -> int:
        """Return the number of disjoint runs of `run_length` free ids, and keep it up to date from now on.

        Sets `num_free`, too. Cost: O(number of ids) for the first call, and after ids were exchanged or the
        pool was resized; else O(1). Each change then costs two searches for the ends of its free run.
        """
        if self.counted_length != run_length or self.num_runs < 0:
            num_runs: i64 = 0
            num_free: i64 = 0
            for run in self.ages.split(bytes([IN_USE])):
                num_runs += len(run) // run_length
                num_free += len(run)
            self.counted_length = run_length
            self.num_runs = num_runs
            self.num_free = num_free
        return self.num_runs

    def rebuild_from(self, pool: Any) -> None:
        """Rebuild the ages from the pool's free queue. O(blocks)."""
        owner = self._owner = pool.block_owner
        keeps_hashes = self._keeps_hashes = pool.enable_caching
        free = [block for block in pool.free_block_queue.get_all_free_blocks() if block.owner is owner]
        has_content = [
            (block.key is not None and keeps_hashes) or block.block_id in pool.reuse_watchers
            for block in free
        ]
        self.ages = bytearray(pool.num_gpu_blocks)
        self._note_all_changed()
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
        if pool.eviction_order.is_open:
            num_ordered = 0  # blocks of the default band and higher ones, which are last in the queue
            for band, blocks in pool.eviction_order.list_bands():
                ours = [block for block in blocks if block.owner is owner]
                if band >= DEFAULT_BAND:
                    num_ordered += len(ours)
                if band > DEFAULT_BAND:
                    self.note_moved(ours, RETAINED)
            self.note_moved(free[: len(free) - num_ordered], EMPTY + 1)

    def note_taken(self, blocks: list[KVCacheBlock]) -> None:
        self._store_all(blocks, False, False)

    def note_unlinked(self, blocks: list[KVCacheBlock]) -> None:
        self.note_taken(blocks)

    def note_relinked(self, blocks: list[KVCacheBlock]) -> None:
        self.note_freed(blocks, False)

    def note_touched(self, blocks: list[KVCacheBlock], num_free: i64, is_access: bool) -> None:
        if num_free > 0:
            self.note_taken(blocks)

    def note_freed(self, blocks: list[KVCacheBlock], keeps_all: bool) -> None:
        self._num_in_generation += self._store_all(blocks, True, keeps_all)
        if self._num_in_generation >= self._width:
            self.now += self._num_in_generation // self._width
            self._num_in_generation %= self._width
            pool: PoolState = self._owner()
            self._set_width(pool.free_block_queue.num_free_blocks)
            if self.now > YOUNGEST:
                self._renumber()

    def note_moved(self, blocks: list[KVCacheBlock], age: int) -> None:
        """Give free blocks that changed their band a new age. Blocks without a hash become empty."""
        for block in blocks:
            self.ages[block.block_id] = EMPTY if block.key is None else age

    def note_moved_to(self, blocks: list[KVCacheBlock], band: int) -> None:
        if band == DEFAULT_BAND:
            self.note_moved(blocks, self.now)
        elif band < DEFAULT_BAND:
            self.note_moved(blocks, EMPTY if band == EMPTY_BAND else EMPTY + 1)
        else:
            self.note_moved(blocks, RETAINED)

    def note_emptied(self, block_id: BlockId) -> None:
        if self.ages[block_id] != IN_USE:
            self.ages[block_id] = EMPTY

    def note_reset(self) -> None:
        self.ages = self.ages.translate(ANY_AGE)

    def note_swapped(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        ages = self.ages
        self.num_runs = -1
        for first_id, second_id in pairs:
            age = ages[first_id]
            ages[first_id] = ages[second_id]
            ages[second_id] = age
            if self.buddies is not None:
                self.buddies.note_changed(first_id, first_id + 1)
                self.buddies.note_changed(second_id, second_id + 1)

    def note_resized(self, num_blocks: int) -> None:
        ages = self.ages
        if num_blocks > len(ages):
            ages.extend(bytes([EMPTY]) * (num_blocks - len(ages)))
        else:
            del ages[num_blocks:]
        self._note_all_changed()

    def _note_all_changed(self) -> None:
        self.num_runs = -1
        self._hand = 1
        if self.buddies is not None:
            self.buddies.note_all_changed()

    def _store_all(self, blocks: list[KVCacheBlock], is_freed: bool, keeps_all: bool) -> i64:
        """Mark blocks as in use, or as free those that have no reference left. Skips other owners' blocks.

        Args:
            keeps_all: freed blocks without a hash have content, too.
        Returns:
            How many of them are free with content now.
        """
        owner = self._owner
        keeps_hashes = self._keeps_hashes
        now = self.now
        first: i64 = 0
        end: i64 = 0
        age: i64 = IN_USE
        num_kept: i64 = 0
        for block in blocks:
            if block.owner is not owner or (is_freed and (block.ref_cnt != 0 or block.is_null)):
                continue
            block_id: i64 = block.block_id
            block_age: i64 = IN_USE
            if is_freed:
                block_age = EMPTY
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
        return num_kept

    def _store(self, first: i64, end: i64, age: i64) -> None:
        length: i64 = end - first
        if self.buddies is not None:
            self.buddies.note_changed(first, end)
        if self.num_runs >= 0 and self.counted_length > 0:
            self._count_change(first, end, age)
        if length == 1:
            self.ages[first] = age
        elif age == IN_USE and length <= 64:
            self.ages[first:end] = _IN_USE_ROWS[length]
        else:
            self.ages[first:end] = _ROW_BY_AGE[age] * length

    def _count_change(self, first: i64, end: i64, age: i64) -> None:
        """Update `num_runs` and `num_free` for ids `[first, end)` that are about to get this age."""
        ages = self.ages
        unit = self.counted_length
        left: i64 = ages.rfind(IN_USE, 0, first) + 1
        right: i64 = ages.find(IN_USE, end)
        if right < 0:
            right = len(ages)
        whole: i64 = (right - left) // unit
        sides: i64 = (first - left) // unit + (right - end) // unit
        num_in_use: i64 = ages.count(IN_USE, first, end)
        if num_in_use == 0:
            self.num_runs -= whole
        elif num_in_use == end - first:
            self.num_runs -= sides
        else:
            for run in ages[left:right].split(bytes([IN_USE])):
                self.num_runs -= len(run) // unit
        self.num_runs += sides if age == IN_USE else whole
        self.num_free += num_in_use
        if age == IN_USE:
            self.num_free -= end - first

    def _set_width(self, num_free_blocks: i64) -> None:
        self._width = max(1, num_free_blocks // GENERATIONS, len(self.ages) // _MAX_GENERATIONS)

    def _renumber(self) -> None:
        """Shift all ages down by half their range, or more after a large batch; the oldest become equal."""
        down = self.now - 2 * GENERATIONS
        table = bytearray(range(256))
        for age in range(EMPTY + 1, RETAINED):
            table[age] = max(EMPTY + 1, age - down)
        self.ages = self.ages.translate(table)
        self.now = 2 * GENERATIONS
