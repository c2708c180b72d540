"""`FreeRunIndex`: the age of each block of a pool, and searches for runs of free ids by age.

An age says whether the block is free, whether it has content, and when that was last used:

    0       in use, or the null block
    1       free and empty: no request can hit it
    2..254  free with content; larger = used later
    255     free, in a band above the default one: reused after all others
"""

from collections.abc import Sequence
from typing import Any, Final, cast

from mypy_extensions import i64

from kv_pool.contiguous.buddy import BuddySystem, find_youngest
from kv_pool.contiguous.fragmentation import FreeRunCounter
from kv_pool.core.block import COMPILED, KVCacheBlock
from kv_pool.core.eviction_order import DEFAULT_BAND, EMPTY_BAND
from kv_pool.core.free_queue import BAND_END
from kv_pool.core.pool_part import FreeIndex
from kv_pool.core.pool_state import PoolState
from kv_pool.core.taking import take_listed
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
        if len(chosen) < num_blocks or not are_queued(chosen):
            if chosen:
                self.rebuild_from(pool)  # a caller has changed the queue itself
            pool.is_changing = was_changing
            return None
        if pool.reuse_watchers or pool.lower_tiers is not None:
            self.note_freed(chosen, False)  # they are free until these were called
            pool.is_changing = was_changing
            take_listed(pool, chosen)
        else:
            take_listed(pool, chosen, self)
            pool.is_changing = was_changing
        return chosen

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
            first: i64 = self.find_run(num_blocks, after, avoids_retained, lowest_empty)
            run = list(pool.blocks[first : first + num_blocks]) if first else []
            if not run or are_queued(run):
                break
            self.rebuild_from(pool)  # a caller has changed the queue itself
        pool.is_changing = was_changing
        return run or None

    def find_run(
        self,
        num_blocks: int,
        after: KVCacheBlock | None = None,
        avoids_retained: bool = False,
        lowest_empty: bool = False,
    ) -> BlockId:
        """Return the first id of the run that `find` returns, as far as ages tell; 0 for none."""
        if after is not None and self.ages.startswith(_EMPTY_ROW * num_blocks, after.block_id + 1):
            return cast(BlockId, after.block_id + 1)
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
        elif lowest_empty:
            lowest: i64 = self.ages.find(_EMPTY_ROW * num_blocks, 0, MAX_SCAN)
            if lowest > 0:
                return cast(BlockId, lowest)
        return self.oldest.find_run(num_blocks, self.ages, good, max_age)

    def has_retained(self) -> bool:
        """Return whether a free block is in a band above the default one. O(number of ids), in one search."""
        return RETAINED in self.ages

    def count_runs(self, run_length: int) -> FreeRunCounter:
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


def are_queued(blocks: list[KVCacheBlock]) -> bool:
    """Return whether all these blocks are in the free queue."""
    return all(block.ref_cnt == 0 and block.next_free_block is not None for block in blocks)


# ---- first fit, and the oldest content -------------------------------------------------------------


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
