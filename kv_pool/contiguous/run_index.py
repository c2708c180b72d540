"""`FreeRunIndex`: finds runs of free ids, and blocks that form long runs."""

from typing import Final, cast

from mypy_extensions import i64

from kv_pool.contiguous.ages import ANY_AGE, EMPTY, GENERATIONS, IN_USE, RETAINED, YOUNGEST, FreeAges
from kv_pool.contiguous.buddy import BuddySystem, find_youngest
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.free_queue import BAND_END
from kv_pool.core.mode import COMPILED
from kv_pool.core.pool_part import PoolPart
from kv_pool.core.pool_state import PoolState
from kv_pool.core.taking import take_listed
from kv_pool.ids import BlockId

PLACEMENTS: Final = ("buddy", "first_fit", "oldest")

_MIN_PIECE: Final = 8
# Bounds of one search, in bytes; benchmarks/bench_runs.py measures their cost and success rate.
_MAX_SWEEP: Final = 4_096
_SWEEP_WINDOW: Final = 128
_MAX_SCAN: Final = 65_536
_MAX_SCANS: Final = 2
_MAX_PLACES: Final = 16


class FreeRunIndex(FreeAges):
    """An index of free runs, searched by age.

    Args:
        early_share: out of eviction order `take` takes only blocks from the queue's first part,
            as far as ages tell; this is the size of that part, 0 to 1.
        placement: where `find_run` finds a run:
            buddy: in the smallest aligned chunk of a power of two that is old enough, see `BuddySystem`; if
                there is none, as "oldest". `take` uses chunks, too.
            first_fit: at the lowest ids, regardless of cached content.
            oldest: where the youngest content is oldest, see `find_oldest_run`.
    """

    def __init__(self, num_blocks: int, early_share: float, placement: str) -> None:
        super().__init__(num_blocks)
        self.placement: str = placement
        self._num_early: i64 = int(early_share * GENERATIONS)
        self._takes_early: bool = early_share > 0

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
            self._take_marked(pool, chosen, was_changing)
        pool.is_changing = was_changing
        return chosen or None

    def take_run(
        self, pool: PoolState, num_blocks: int, avoids_retained: bool = False
    ) -> list[KVCacheBlock] | None:
        """Take a run as `RunBlockPool.get_new_run` does, as part of a larger call.

        Args:
            avoids_retained: do not take a run with a block of a band above the default one.
        """
        if num_blocks == 0:
            return []
        was_changing = pool.is_changing
        pool.is_changing = True
        run: list[KVCacheBlock] = []
        first = self.find_run(num_blocks)
        while first is not None:
            run = list(pool.blocks[first : first + num_blocks])
            if are_queued(run):
                break
            self.rebuild_from(pool)  # a caller has changed the queue itself
            first = self.find_run(num_blocks)
        if first is None or (avoids_retained and RETAINED in self.ages[first : first + num_blocks]):
            pool.is_changing = was_changing
            return None
        self._store(first, first + num_blocks, IN_USE)
        self._take_marked(pool, run, was_changing)
        pool.is_changing = was_changing
        return run

    def _take_marked(self, pool: PoolState, chosen: list[KVCacheBlock], was_changing: bool) -> None:
        """Take blocks that are marked as in use here."""
        informed: PoolPart | None = self
        if pool.reuse_watchers or pool.lower_tiers is not None:
            self.note_freed(chosen, False)  # they are free while watchers are called
            informed = None
            pool.is_changing = was_changing
        take_listed(pool, chosen, informed)

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
        if num_blocks == 1 and (after is None or after.is_null):
            if self.buddies is None:
                return []
            fragment = self.buddies.find_single(ages, self._find_idle_age())
            if not fragment:
                return []
            self._store(fragment, fragment + 1, IN_USE)
            return [blocks[fragment]]
        queue = pool.free_block_queue
        head = queue.fake_free_list_head.next_free_block
        while head is not None and head.ref_cnt == BAND_END:
            head = head.next_free_block
        max_age: i64 = self._find_early_age(head)
        need: i64 = num_blocks
        chosen: list[KVCacheBlock] = []
        if after is not None and not after.is_null:
            first: i64 = after.block_id + 1
            data = bytes(ages[first : first + need])
            length: i64 = 0
            while length < len(data) and data[length] != IN_USE and data[length] <= max_age:
                length += 1
            if length > 0:
                chosen.extend(blocks[first : first + length])
                self._store(first, first + length, IN_USE)
                need -= length
            if need == 0:
                return chosen
        if self.buddies is not None:
            need -= self._choose_chunks(chosen, blocks, need)
        elif need > 1:
            pieces = self.sweep(need, max_age)
            position: i64 = 0
            while position < len(pieces):
                first = pieces[position]
                end: i64 = pieces[position + 1]
                chosen.extend(blocks[first:end])
                self._store(first, end, IN_USE)
                need -= end - first
                position += 2
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

    def _choose_chunks(
        self, chosen: list[KVCacheBlock], blocks: tuple[KVCacheBlock, ...], num_blocks: i64
    ) -> i64:
        """Choose and mark blocks by chunks, such as 8 + 4 + 1 for 13, each from the smallest chunks.

        Returns:
            How many were chosen; fewer than `num_blocks` if the remaining blocks were used recently.
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
                break
            else:
                size //= 2
            while size > max(1, need):
                size //= 2
        return num_blocks - need

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

    def _find_good_age(self) -> i64:
        """Return the age below which a block was hardly used since the last turnover of the free blocks."""
        return max(EMPTY, self.now - GENERATIONS + GENERATIONS // 8)

    def _find_idle_age(self) -> i64:
        """Return the age below which a block was unused in the last quarter turnover of the free blocks."""
        return max(EMPTY, self.now - GENERATIONS // 4)

    def sweep(self, num_blocks: int, max_age: int) -> list[int]:
        """Find up to `num_blocks` free ids in long pieces, no age above `max_age`, from the hand onwards.

        Returns:
            The pieces as [first, end, first, end, ...], disjoint; each has at least 8 blocks, except the last
            one if fewer are needed. May be fewer blocks than requested, or none.

        The hand moves through the ids in a circle, like a clock's: blocks taken together come up together
        again, with the same age as their neighbours, so that both runs and the eviction order last. Cost:
        O(num_blocks), within a fixed number of bytes.
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
                    position = start  # the piece may continue in the next window
                    break
                if length > 0 and length >= min(need, _MIN_PIECE):
                    pieces.append(at + start)
                    pieces.append(at + position)
                    need -= length
            at += position
            left -= position
        self._hand = at
        return pieces

    def find_run(self, num_blocks: int) -> BlockId | None:
        """Return the first id of `num_blocks` consecutive free ids by `placement`, or None."""
        if self.placement == "first_fit":
            place = self.ages.translate(ANY_AGE).find(ANY_AGE[1:2] * num_blocks)
            return None if place < 0 else cast(BlockId, place)
        if self.placement == "buddy":
            if self.buddies is None:
                self.buddies = BuddySystem()
            first = self.buddies.find_run(num_blocks, self.ages, self._find_good_age(), RETAINED)
            if first:
                return first
        return self.find_oldest_run(num_blocks)

    def find_oldest_run(self, num_blocks: int) -> BlockId | None:
        """Return the first id of `num_blocks` consecutive free ids with old content, or None.

        Searches the ids in a circle, from the end of the last search, and returns the place whose youngest
        block was used longest ago, among the first 16 places that it finds. A place that was hardly used
        since the last turnover of the free blocks ends the search. In each free run it tries the multiples of
        the next power of two, so that the rest of the run stays whole, and both ends; the first of equally
        old places wins. A call scans at most 131,072 ids, and the next call continues from there: in a larger
        pool None does not prove that there is no run.
        """
        n: i64 = num_blocks
        num_all: i64 = len(self.ages)
        is_whole: bool = num_all <= _MAX_SCANS * _MAX_SCAN
        # If the loop below is not compiled, methods of bytes detect faster that there is no run.
        if not COMPILED and is_whole and ANY_AGE[1:2] * num_blocks not in self.ages.translate(ANY_AGE):
            return None
        slot: i64 = 1
        while slot < n:
            slot *= 2
        good: i64 = self._find_good_age()
        best: i64 = 0
        best_age: i64 = RETAINED + 1
        num_places: i64 = 0
        at = self._hand if self._hand < num_all else 1
        left: i64 = min(num_all + n - 2, _MAX_SCANS * _MAX_SCAN)
        while left > 0 and num_places < _MAX_PLACES and best_age > good:
            data = bytes(self.ages[at : at + min(left, _MAX_SCAN)])
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
            self._hand = best + n
        elif not is_whole:
            self._hand = at
        return cast(BlockId, best) if best else None


def are_queued(blocks: list[KVCacheBlock]) -> bool:
    """Return whether all these blocks are in the free queue."""
    return all(block.ref_cnt == 0 and block.next_free_block is not None for block in blocks)
