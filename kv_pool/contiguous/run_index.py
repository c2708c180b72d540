"""`FreeRunIndex`: finds runs of free ids, and blocks that make long runs."""

from typing import Final

from mypy_extensions import i64

from kv_pool.contiguous.ages import EMPTY, IN_USE, KEPT, YOUNGEST
from kv_pool.contiguous.buddy import BuddySystem
from kv_pool.contiguous.free_ages import ANY_AGE, GENERATIONS, FreeAges
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.free_queue import BAND_END, FreeKVCacheBlockQueue

PLACEMENTS: Final = ("buddy", "first_fit", "oldest")

_MIN_PIECE: Final = 8
# Bounds of one search, in bytes; see benchmarks/bench_runs.py for what they cost and find.
_MAX_SWEEP: Final = 4_096
_SWEEP_WINDOW: Final = 128
_MAX_SCAN: Final = 65_536
_MAX_SCANS: Final = 2
_MAX_PLACES: Final = 16


class FreeRunIndex(FreeAges):
    """Finds free runs by looking at ages.

    Args:
        early_share: `choose` takes none, but what is next, that is not among the first of so large a share of
            the free queue, as far as ages tell.
        placement: where `find_run` finds a run:
            buddy: in an aligned chunk of the next power of two, the smallest that is old enough, see
                `BuddySystem`; where there is none, as "oldest". `choose` goes by chunks, too.
            first_fit: at the lowest ids, whatever content is lost.
            oldest: where the youngest content is oldest, see `find_oldest_run`.
    """

    def __init__(self, num_blocks: int, early_share: float, placement: str) -> None:
        super().__init__(num_blocks)
        self.placement: str = placement
        self._num_early: i64 = int(early_share * GENERATIONS)

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
        if self.buddies is not None:
            need -= self._choose_chunks(chosen, blocks, need)
        elif need > 1:
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

    def _choose_chunks(
        self, chosen: list[KVCacheBlock], blocks: tuple[KVCacheBlock, ...], num_blocks: i64
    ) -> i64:
        """Choose blocks chunk by chunk, 8 + 4 + 1 of 13, and the last ones from the smallest chunks.

        They count as in use from here on.
        Returns:
            How many were chosen; fewer where what is left was used lately.
        """
        assert self.buddies is not None
        max_age: i64 = self._find_idle_age()
        need: i64 = num_blocks
        size: i64 = 1
        while size * 2 <= need:
            size *= 2
        while need > 0:
            first: i64 = 0
            if size > 1:
                first = self.buddies.find_run(size, self.ages, max_age, max_age)
            else:
                first = self.buddies.find_single(self.ages, max_age)
            if first > 0:
                chosen.extend(blocks[first : first + size])
                self._store(first, first + size, IN_USE)
                need -= size
            elif size == 1:
                break  # what is left was used lately
            if first == 0:
                size //= 2
            while size > max(1, need):
                size //= 2
        return num_blocks - need

    def _find_early_age(self, head: KVCacheBlock | None) -> i64:
        """The age of blocks that may be taken for the sake of a run.

        Args:
            head: the first block of the free queue.
        """
        max_age: i64 = max(EMPTY, self.now - GENERATIONS + self._num_early)
        if head is not None and 0 < head.block_id < len(self.ages):
            # Where use grows, the front of the queue is younger than so many turnovers ago.
            oldest: i64 = max(EMPTY + 1, self.ages[head.block_id])
            max_age = max(max_age, oldest + (self.now - oldest) * self._num_early // GENERATIONS)
            max_age = min(max_age, YOUNGEST)
        return max_age

    def _find_good_age(self) -> i64:
        """The age of what has hardly been used since the free blocks last turned over."""
        return max(EMPTY, self.now - GENERATIONS + GENERATIONS // 8)

    def _find_idle_age(self) -> i64:
        """The age of what was not used in the last quarter of a turnover of the free blocks."""
        return max(EMPTY, self.now - GENERATIONS // 4)

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
            place = self.ages.translate(ANY_AGE).find(ANY_AGE[1:2] * num_blocks)
            return None if place < 0 else place
        if self.placement == "buddy":
            if self.buddies is None:
                self.buddies = BuddySystem()
            place = self.buddies.find_run(num_blocks, self.ages, self._find_good_age(), KEPT)
            if place:
                return place
        return self.find_oldest_run(num_blocks)

    def find_fragment(self) -> int:
        """The id of a block of the smallest chunk that is old enough for it; 0 for none.

        Of a pool that was not asked for a run yet always 0: it has no chunks.
        """
        if self.buddies is None:
            return 0
        return self.buddies.find_single(self.ages, self._find_idle_age())

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
