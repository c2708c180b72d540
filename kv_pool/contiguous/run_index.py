"""`FreeRunIndex`: which ids are free and how long ago each was used, one byte a block."""

from collections.abc import Sequence
from typing import Any, Final

from mypy_extensions import i64

from kv_pool.contiguous.buddy import IN_USE, BuddySystem
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.eviction_order import DEFAULT_BAND, EMPTY_BAND
from kv_pool.core.free_queue import BAND_END, FreeKVCacheBlockQueue

EMPTY: Final = 1
"""The age byte of a free block that nobody can hit."""

PLACEMENTS: Final = ("buddy", "first_fit", "oldest")

KEPT: Final = 255
"""The age byte of a free block in a band above the default one: reused after all others."""

_YOUNGEST: Final = 254
# Rows of one age: a bytearray takes a slice of another three times as fast as one of bytes.
_ROW_BY_AGE: Final = [bytearray([age]) for age in range(256)]
_IN_USE_ROWS: Final = [bytearray(length) for length in range(65)]
_ANY_AGE: Final = bytes([0]) + bytes([1]) * 255
# Generations per turnover of the free blocks, which leaves room for four turnovers in a byte. At least so
# large a part of the pool is one generation, so that moving ages down stays rare when little is free.
_GENERATIONS: Final = 64
_MAX_GENERATIONS: Final = 4_096
_MIN_PIECE: Final = 8
# Bounds of one search, in bytes; see benchmarks/bench_runs.py for what they cost and find.
_MAX_SWEEP: Final = 4_096
_SWEEP_WINDOW: Final = 128
_MAX_SCAN: Final = 65_536
_MAX_SCANS: Final = 2
_MAX_PLACES: Final = 16


class FreeRunIndex:
    """Finds free runs, oldest content first, by looking at bytes.

        ages:  0  0  1  1  9  9  9  0  0  30      0 in use (or the null block); 1 free and empty;
        id:    0  1  2  3  4  5  6  7  8  9       2 to 254 free with content, larger = used later; 255 kept

    An age is a generation: a sixty-fourth of the free blocks was given back with content between one and the
    next, where few are free a single block. Ages that would pass 254 are moved down; what is older than two
    turnovers counts as equally old then.

    Derived from the free queue, which owns freeness: `rebuild` makes it anew. It is told of every change by
    `RunBlockPool`, in batches, since a run is one store whatever its length.

    Attributes:
        is_stale: it was found to be wrong, and has to be rebuilt before it is asked again.

    Args:
        placement: where `find_run` finds a run:
            buddy: in an aligned chunk of the next power of two, the smallest that is old enough, see
                `BuddySystem`; where there is none, as "oldest".
            first_fit: at the lowest ids, whatever content is lost.
            oldest: where the youngest content is oldest, see `find_oldest_run`.
        early_share: `choose` takes none, but what is next, that is not among the first of so large a share of
            the free queue, as far as ages tell.
    """

    def __init__(self, num_blocks: int, early_share: float, placement: str) -> None:
        self.is_stale = False
        self.placement: str = placement
        self._num_early: i64 = int(early_share * _GENERATIONS)
        self.ages: bytearray = bytearray(num_blocks)
        self.now: i64 = EMPTY + 1
        self._width: i64 = 1
        self._num_in_generation: i64 = 0
        self._hand: i64 = 1  # where the next sweep or search begins
        self._buddies: BuddySystem | None = None  # of a pool that was asked for what needs them

    # ---- being told ------------------------------------------------------------------------------

    def rebuild(self, num_blocks: int, free: Sequence[KVCacheBlock], has_content: Sequence[bool]) -> None:
        """Rebuild the index from the free blocks; their ages follow from the eviction order. O(num_blocks).

        The caller clears `is_stale`.
        """
        self.ages = bytearray(num_blocks)
        if self._buddies is not None:
            self._buddies.note_all_changed()
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
            if self.now > _YOUNGEST:
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
        self.ages = self.ages.translate(_ANY_AGE)

    def swap(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The two blocks of each pair have exchanged their ids."""
        ages = self.ages
        for first_id, second_id in pairs:
            age = ages[first_id]
            ages[first_id] = ages[second_id]
            ages[second_id] = age
            if self._buddies is not None:
                self._buddies.note_changed(first_id, first_id + 1)
                self._buddies.note_changed(second_id, second_id + 1)

    def resize(self, num_blocks: int) -> None:
        """The pool has so many blocks now; new ones are free and empty. Those cut off must have been free."""
        ages = self.ages
        if num_blocks > len(ages):
            ages.extend(bytes([EMPTY]) * (num_blocks - len(ages)))
        else:
            del ages[num_blocks:]
        if self._buddies is not None:
            self._buddies.note_all_changed()
        self._hand = 1

    def _store(self, first: i64, end: i64, age: i64) -> None:
        length: i64 = end - first
        if self._buddies is not None:
            self._buddies.note_changed(first, end)
        if length == 1:
            self.ages[first] = age
        elif age == IN_USE and length <= 64:
            self.ages[first:end] = _IN_USE_ROWS[length]
        else:
            self.ages[first:end] = _ROW_BY_AGE[age] * length

    def _set_width(self, num_free_blocks: i64) -> None:
        self._width = max(1, num_free_blocks // _GENERATIONS, len(self.ages) // _MAX_GENERATIONS)

    def _renumber(self) -> None:
        """Move all ages down by half their range, or more if a batch was large; the oldest become one."""
        down = self.now - 2 * _GENERATIONS
        table = bytearray(range(256))
        for age in range(EMPTY + 1, KEPT):
            table[age] = max(EMPTY + 1, age - down)
        self.ages = self.ages.translate(table)
        self.now = 2 * _GENERATIONS

    # ---- looking ---------------------------------------------------------------------------------

    def list_runs(self) -> list[int]:
        """The lengths of the maximal runs of free blocks, by id. O(number of blocks)."""
        return [len(run) for run in self.ages.split(bytes([IN_USE])) if run]

    def choose(
        self, blocks: tuple[KVCacheBlock, ...], queue: FreeKVCacheBlockQueue, next_id: int, num_blocks: int
    ) -> list[KVCacheBlock]:
        """Choose `num_blocks` free blocks that make long runs. They count as in use from here on.

        Args:
            blocks: all blocks of the pool.
            next_id: what can be had from this id on comes first; 0 for nowhere.
        Returns:
            Run after run, each by id: first from `next_id`, then pieces that are old enough, then, for want
            of those, what is next in the queue. Fewer blocks only where not so many in the queue are ours.
        """
        chosen: list[KVCacheBlock] = []
        ages = self.ages
        owner = blocks[0].owner
        head = queue.fake_free_list_head.next_free_block
        while head is not None and head.ref_cnt == BAND_END:
            head = head.next_free_block
        max_age: i64 = self._find_early_age(head)
        need: i64 = num_blocks
        first: i64 = next_id
        if 0 < first < len(ages):
            data = bytes(ages[first : first + need])
            end: i64 = 0
            while end < len(data) and data[end] != IN_USE and data[end] <= max_age:
                end += 1
            if end > 0:
                end += first
                chosen.extend(blocks[first:end])
                self._store(first, end, IN_USE)
                need -= end - first
        if need > 1:
            pieces = self.sweep(need, max_age)
            position: i64 = 0
            while position < len(pieces):
                first = pieces[position]
                end = pieces[position + 1]
                chosen.extend(blocks[first:end])
                self._store(first, end, IN_USE)
                need -= end - first
                position += 2
        if need > 0:
            rest: list[int] = []
            block = head
            tail = queue.fake_free_list_tail
            while need > 0 and block is not None and block is not tail:
                if block.owner is owner and ages[block.block_id] != IN_USE:
                    rest.append(block.block_id)
                    need -= 1
                block = block.next_free_block
            rest.sort()
            others = [blocks[block_id] for block_id in rest]
            self.note_taken(others, owner)
            chosen.extend(others)
        return chosen

    def _find_early_age(self, head: KVCacheBlock | None) -> i64:
        """The age of blocks that may be taken for the sake of a run.

        Args:
            head: the first block of the free queue.
        """
        max_age: i64 = max(EMPTY, self.now - _GENERATIONS + self._num_early)
        if head is not None and 0 < head.block_id < len(self.ages):
            # Where use grows, the front of the queue is younger than so many turnovers ago.
            oldest: i64 = max(EMPTY + 1, self.ages[head.block_id])
            max_age = max(max_age, oldest + (self.now - oldest) * self._num_early // _GENERATIONS)
            max_age = min(max_age, _YOUNGEST)
        return max_age

    def _find_good_age(self) -> i64:
        """The age of what has hardly been used since the free blocks last turned over."""
        return max(EMPTY, self.now - _GENERATIONS + _GENERATIONS // 8)

    def sweep(self, num_blocks: int, max_age: int) -> list[int]:
        """Up to `num_blocks` free ids in long pieces, none used later than `max_age`, at the sweeping hand.

        Returns:
            The pieces as [first, end, first, end, ...], disjoint; none shorter than 8 blocks unless it is
            the last that is needed. Fewer blocks than asked for, or none, are an answer.

        The hand goes round by id, as a clock's: what was taken together comes up together again, as old as
        everything beside it, so that both runs and eviction order survive. O(num_blocks), at most a bounded
        number of bytes.
        """
        ages = self.ages
        num_all: i64 = len(ages)
        oldest: i64 = max_age
        pieces: list[int] = []
        need: i64 = num_blocks
        at = self._hand
        left: i64 = min(max(_MAX_SWEEP, 32 * need), num_all - 1)
        while need > 0 and left > 0:
            if at >= num_all:
                at = 1
            data = bytes(ages[at : at + min(left, max(2 * need, _SWEEP_WINDOW))])
            size: i64 = len(data)
            position: i64 = 0
            while need > 0 and position < size:
                while position < size and (data[position] == IN_USE or data[position] > oldest):
                    position += 1
                start: i64 = position
                end: i64 = min(size, start + need)
                while position < end and data[position] != IN_USE and data[position] <= oldest:
                    position += 1
                length: i64 = position - start
                if position == size and start > 0 and length < need and at + size < num_all:
                    position = start  # it may go on in the next window
                    break
                if length > 0 and length >= min(need, _MIN_PIECE):
                    pieces.append(at + start)
                    pieces.append(at + position)
                    need -= length
            at += position
            left -= position
        self._hand = at
        return pieces

    def find_run(self, num_blocks: int) -> int | None:
        """The first id of `num_blocks` consecutive free ones, or None; where, `placement` says."""
        if self.placement == "first_fit":
            place = self.ages.translate(_ANY_AGE).find(_ANY_AGE[1:2] * num_blocks)
            return None if place < 0 else place
        if self.placement == "buddy":
            if self._buddies is None:
                self._buddies = BuddySystem()
            place = self._buddies.find_run(num_blocks, self.ages, self._find_good_age())
            if place:
                return place
        return self.find_oldest_run(num_blocks)

    def find_fragment(self, queue: FreeKVCacheBlockQueue) -> int:
        """The id of a block in a small chunk that is among the first of the queue, as far as ages tell.

        Returns:
            0 for none, and in a pool that was not asked for a run yet.
        """
        if self._buddies is None:
            return 0
        head = queue.fake_free_list_head.next_free_block
        while head is not None and head.ref_cnt == BAND_END:
            head = head.next_free_block
        return self._buddies.find_single(self.ages, self._find_early_age(head))

    def find_oldest_run(self, num_blocks: int) -> int | None:
        """The first id of `num_blocks` consecutive free ones whose content is old, or None.

        Looks from where the last search ended, round by id, and takes the place whose youngest block was used
        longest ago: of all in the runs that it meets, up to 16, and the first that has hardly been used since
        the free blocks last turned over is good enough. In a run it tries the places at a multiple of the
        next power of two, so that a run's tail and its neighbours stay whole, and its two ends; of equally
        old places the first of these. A call looks at 131,072 ids at most, and the next one goes on from
        there: in a larger pool None does not say that there is no run.
        """
        n: i64 = num_blocks
        num_all: i64 = len(self.ages)
        slot: i64 = 1
        while slot < n:
            slot *= 2
        good: i64 = self._find_good_age()
        best: i64 = 0
        best_age: i64 = KEPT + 1
        num_places: i64 = 0
        at = self._hand if self._hand < num_all else 1
        left: i64 = min(num_all + n - 2, _MAX_SCANS * _MAX_SCAN)
        while left > 0 and num_places < _MAX_PLACES and best_age > good:
            data = bytes(self.ages[at : at + min(left, _MAX_SCAN)])
            size: i64 = len(data)
            last: i64 = n - 1
            while last < size and num_places < _MAX_PLACES and best_age > good:
                # Backwards from where a run would end: _MAX_PLACES ids are jumped over.
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
                    age: i64 = EMPTY
                    position = place
                    while position < place + n:
                        if data[position] > age:
                            age = data[position]
                            if age >= best_age:
                                break
                        position += 1
                    if age < best_age:
                        best = at + place
                        best_age = age
                    if age < KEPT:
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
            else:  # a run may begin in this part and end in the next one
                at += max(1, size - n + 1)
                if left > 0:
                    left += n - 1
        self._hand = best + n if best else at
        return best or None


def note_moved(index: FreeRunIndex, blocks: list[KVCacheBlock], band: int) -> None:
    """Give free blocks the age of the band to which they were moved."""
    if band == DEFAULT_BAND:
        index.note_moved(blocks, index.now)
    elif band < DEFAULT_BAND:
        index.note_moved(blocks, EMPTY if band == EMPTY_BAND else EMPTY + 1)
    else:
        index.note_moved(blocks, KEPT)
