"""`FreeRunIndex`: the age of each block of a pool, and searches for runs of free ids by age.

See `run_search` for what an age says.
"""

from collections.abc import Sequence
from typing import Any, Final, cast

from mypy_extensions import i64

from kv_pool.contiguous.buddy import BuddySystem
from kv_pool.contiguous.run_search import (
    ANY_AGE,
    EMPTY,
    IN_USE,
    MAX_SCAN,
    RETAINED,
    YOUNGEST,
    OldestRuns,
    find_first_fit,
)
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.eviction_order import DEFAULT_BAND, EMPTY_BAND
from kv_pool.core.free_queue import BAND_END
from kv_pool.core.pool_part import FreeIndex, PoolPart
from kv_pool.core.pool_state import PoolState
from kv_pool.core.taking import take_listed
from kv_pool.ids import BlockId

# Rows of one age: assigning a slice to a bytearray is three times as fast from a bytearray as from bytes.
_ROW_BY_AGE: Final = [bytearray([age]) for age in range(256)]
_EMPTY_ROW: Final = bytes([EMPTY])
_IN_USE_ROWS: Final = [bytearray(length) for length in range(65)]

GENERATIONS: Final = 64
"""Generations per turnover of the free blocks; a byte can distinguish almost four turnovers."""

# A generation is at least 1 / _MAX_GENERATIONS of the pool, so that renumbering stays rare when few blocks
# are free.
_MAX_GENERATIONS: Final = 4_096

PLACEMENTS: Final = ("buddy", "first_fit", "oldest")


class FreeRunIndex(FreeIndex):
    """An index of free runs: the age of each id, free or not, and how long ago it was used.

        ages:  0  0  1  1  9  9  9  0  0  30
        id:    0  1  2  3  4  5  6  7  8  9

    An age is a generation. A generation ends when 1/64 of the free blocks were freed with content, or a
    single block if few are free. When ages would exceed 254 they are renumbered; then all blocks older than
    two turnovers have the same age.

    Derived from the free queue, which decides which blocks are free; `rebuild_from` restores it. Changes are
    noted in batches, since a run takes one store whatever its length.

    Args:
        early_share: out of eviction order `take` takes only blocks from the queue's first part,
            as far as ages tell; this is the size of that part, 0 to 1.
        placement: where `find_run` finds a run:
            buddy: in the smallest aligned chunk of a power of two that is old enough, see `BuddySystem`; if
                there is none, as "oldest". `take` uses chunks, too.
            first_fit: at the lowest ids, regardless of cached content.
            oldest: where the youngest content is oldest, see `OldestRuns`.

    Attributes:
        buddies: the aligned chunks of the free ids; None until the first search that needs them.
        counter: counts the free runs of one length; None until `count_runs`, and after ids were exchanged.
    """

    def __init__(self, num_blocks: int, early_share: float, placement: str) -> None:
        self.ages: bytearray = bytearray(num_blocks)
        self.placement: str = placement
        self._num_early: i64 = int(early_share * GENERATIONS)
        self._takes_early: bool = early_share > 0
        self._owner: Any = None
        self._keeps_hashes: bool = True  # freed blocks with a hash have content
        self.now: i64 = EMPTY + 1
        self._width: i64 = 1
        self._num_in_generation: i64 = 0
        self.oldest: OldestRuns = OldestRuns()
        self.buddies: BuddySystem | None = None
        self.counter: FreeRunCounter | None = None

    # ---- taking ----------------------------------------------------------------------------------

    def take(self, pool: PoolState, after: KVCacheBlock | None, num_blocks: int) -> list[KVCacheBlock] | None:
        """As in `FreeIndex`. Prefers runs of consecutive ids where that is cheap."""
        if not self._takes_early or num_blocks == 0:
            return None
        was_changing = pool.is_changing
        pool.is_changing = True
        chosen = self._choose_and_mark(pool, after, num_blocks)
        if chosen and (len(chosen) < num_blocks or not are_queued(chosen)):
            self.rebuild_from(pool)  # a caller has changed the queue itself
            chosen = []
        if chosen:
            informed: PoolPart | None = self
            if pool.reuse_watchers or pool.lower_tiers is not None:
                self.note_freed(chosen, False)  # they are free while watchers are called
                informed = None
                pool.is_changing = was_changing
            take_listed(pool, chosen, informed)
        pool.is_changing = was_changing
        return chosen or None

    # ---- searching -------------------------------------------------------------------------------

    def _choose_and_mark(
        self, pool: PoolState, after: KVCacheBlock | None, num_blocks: int
    ) -> list[KVCacheBlock]:
        """Choose `num_blocks` free blocks that form long runs, and mark them as in use.

        Returns:
            Runs, each by id: first the ids after that of `after`, then pieces that are old enough, then the
            next blocks in the queue; fewer only if the queue has fewer blocks of this pool. A single block
            without `after`, which is no run, is one of a small chunk; [] if there is none.
        """
        ages = self.ages
        blocks = pool.blocks
        chosen: list[KVCacheBlock] = []
        if num_blocks == 1 and (after is None or after.is_null):
            if self.buddies is not None:
                self._mark(chosen, blocks, self.buddies.find_pieces(1, ages, self._find_unused_age()))
            return chosen
        queue = pool.free_block_queue
        head = queue.fake_free_list_head.next_free_block
        while head is not None and head.ref_cnt == BAND_END:
            head = head.next_free_block
        max_age: i64 = self._find_early_age(head)
        need: i64 = num_blocks
        if after is not None and not after.is_null:
            first: i64 = after.block_id + 1
            data = bytes(ages[first : first + need])
            length: i64 = 0
            while length < len(data) and data[length] != IN_USE and data[length] <= max_age:
                length += 1
            if length > 0:
                need -= self._mark(chosen, blocks, [(first, first + length)])
            if need == 0:
                return chosen
        if self.buddies is not None:
            need -= self._mark(chosen, blocks, self.buddies.find_pieces(need, ages, self._find_unused_age()))
        elif need > 1:
            need -= self._mark(chosen, blocks, self.oldest.find_pieces(need, ages, max_age))
        rest: list[BlockId] = []
        block = head
        while need > 0 and block is not None and block is not queue.fake_free_list_tail:
            if block.owner is pool.block_owner and ages[block.block_id] != IN_USE:
                rest.append(block.block_id)
                need -= 1
            block = block.next_free_block
        if rest:
            rest.sort()
            others = [blocks[block_id] for block_id in rest]
            self.note_taken(others)
            chosen += others
        return chosen

    def _mark(
        self, chosen: list[KVCacheBlock], blocks: tuple[KVCacheBlock, ...], pieces: list[tuple[int, int]]
    ) -> i64:
        """Choose the blocks of these pieces of ids, and mark them as in use. Return how many they are."""
        num_marked: i64 = 0
        for piece in pieces:
            first: i64 = piece[0]
            end: i64 = piece[1]
            chosen.extend(blocks[first:end])
            self._store(first, end, IN_USE)
            num_marked += end - first
        return num_marked

    def _find_early_age(self, head: KVCacheBlock | None) -> i64:
        """Return the greatest age of blocks that may be taken out of order to form a run.

        Args:
            head: the first block of the free queue.
        """
        max_age: i64 = max(EMPTY, self.now - GENERATIONS + self._num_early)
        if head is not None and 0 < head.block_id < len(self.ages):
            # While the use of the pool grows, the front of the queue is younger than that.
            oldest: i64 = max(EMPTY + 1, self.ages[head.block_id])
            max_age = max(max_age, oldest + (self.now - oldest) * self._num_early // GENERATIONS)
            max_age = min(max_age, YOUNGEST)
        return max_age

    def _find_unused_age(self) -> i64:
        """Return the age below which a block was not used in the last quarter turnover of the free blocks."""
        return max(EMPTY, self.now - GENERATIONS // 4)

    def _find_good_age(self) -> i64:
        """Return the age below which a block was hardly used since the last turnover of the free blocks."""
        return max(EMPTY, self.now - GENERATIONS + GENERATIONS // 8)

    def find(
        self,
        pool: PoolState,
        num_blocks: int,
        after: KVCacheBlock | None = None,
        *,
        avoids_retained: bool = False,
        lowest_empty: bool = False,
    ) -> list[KVCacheBlock] | None:
        """Return free blocks with consecutive ids, lowest first; None if there are none.

        Takes the ids directly after `after` if they are empty, else a run by `placement`.

        Args:
            avoids_retained: find no run with a block of a band above the default one.
            lowest_empty: with the placement "oldest", prefer the lowest run of empty ids: it is found at
                once, it evicts nothing, and large runs stay whole.
        """
        run: list[KVCacheBlock] = []
        if num_blocks == 0:
            return run
        was_changing = pool.is_changing
        pool.is_changing = True
        while True:
            first: i64 = self._find_empty(num_blocks, after, lowest_empty)
            if first == 0:
                first = self.find_run(num_blocks, avoids_retained)
            run = list(pool.blocks[first : first + num_blocks]) if first else []
            if not run or are_queued(run):
                break
            self.rebuild_from(pool)  # a caller has changed the queue itself
        pool.is_changing = was_changing
        return run or None

    def _find_empty(self, num_blocks: int, after: KVCacheBlock | None, lowest_empty: bool) -> BlockId:
        """Return the first of the empty ids that `find` prefers to a search by `placement`; 0 for none."""
        if after is not None and self.ages.startswith(_EMPTY_ROW * num_blocks, after.block_id + 1):
            return cast(BlockId, after.block_id + 1)
        if lowest_empty and self.placement == "oldest":
            return cast(BlockId, max(0, self.ages.find(_EMPTY_ROW * num_blocks, 0, MAX_SCAN)))
        return cast(BlockId, 0)

    def find_run(self, num_blocks: int, avoids_retained: bool = False) -> BlockId:
        """Return the first id of `num_blocks` consecutive free ids by `placement`; 0 for none.

        Args:
            avoids_retained: see `find`.
        """
        max_age = YOUNGEST if avoids_retained else RETAINED
        if self.placement == "first_fit":
            return find_first_fit(num_blocks, self.ages, max_age)
        good = self._find_good_age()
        if self.placement == "buddy":
            if self.buddies is None:
                self.buddies = BuddySystem()
            first = self.buddies.find_run(num_blocks, self.ages, good, YOUNGEST)
            if first:
                return first
        return self.oldest.find_run(num_blocks, self.ages, good, max_age)

    def has_retained(self) -> bool:
        """Return whether a free block is in a band above the default one. O(number of ids), in one search."""
        return RETAINED in self.ages

    def count_runs(self, run_length: int) -> "FreeRunCounter":
        """Return the number of free ids and of disjoint runs of `run_length`, kept up to date from now on.

        Cost: O(number of ids) for the first call, and after ids were exchanged or the pool was resized; else
        O(1). Each change then costs two searches for the ends of its free run.
        """
        if self.counter is None or self.counter.run_length != run_length:
            self.counter = FreeRunCounter(self.ages, run_length)
        return self.counter

    # ---- changes of the pool -----------------------------------------------------------------------

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
        self.counter = None
        for first_id, second_id in pairs:
            age = ages[first_id]
            ages[first_id] = ages[second_id]
            ages[second_id] = age
            if self.buddies is not None:
                self.buddies.note_changed(first_id, first_id + 1)
                self.buddies.note_changed(second_id, second_id + 1)

    def note_resized(self, num_blocks: int) -> None:
        ages = self.ages
        ages.extend(bytes([EMPTY]) * max(0, num_blocks - len(ages)))
        del ages[num_blocks:]
        self._note_all_changed()

    def _note_all_changed(self) -> None:
        self.counter = None
        self.oldest.hand = 1
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
        if self.counter is not None:
            self.counter.note_change(self.ages, first, end, age)
        if length == 1:
            self.ages[first] = age
        elif age == IN_USE and length <= 64:
            self.ages[first:end] = _IN_USE_ROWS[length]
        else:
            self.ages[first:end] = _ROW_BY_AGE[age] * length

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


class FreeRunCounter:
    """Counts the free ids of a pool, and the disjoint runs of one length among them, as ids change.

    Args:
        ages: the age of each id, see `FreeRunIndex`.
    """

    def __init__(self, ages: bytearray, run_length: int) -> None:
        self.run_length: i64 = run_length
        self.num_runs: i64 = 0
        self.num_free: i64 = 0
        for run in ages.split(bytes([IN_USE])):
            self.num_runs += len(run) // self.run_length
            self.num_free += len(run)

    def note_change(self, ages: bytearray, first: i64, end: i64, age: i64) -> None:
        """Update the counts for ids `[first, end)` that are about to get this age."""
        unit = self.run_length
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


def are_queued(blocks: list[KVCacheBlock]) -> bool:
    """Return whether all these blocks are in the free queue."""
    return all(block.ref_cnt == 0 and block.next_free_block is not None for block in blocks)
