"""`EvictionOrder`: priority bands of the free queue. Blocks of lower bands are reused first."""

from typing import Final

from mypy_extensions import mypyc_attr

from kv_pool.core.block import SENTINEL_ID, KVCacheBlock
from kv_pool.core.free_queue import BAND_END, FreeKVCacheBlockQueue, link
from kv_pool.core.pool_part import PoolPart
from kv_pool.errors import InvalidArgumentError, InvalidBlockError

MAX_BAND: Final = 100
"""Bands go from -MAX_BAND to MAX_BAND."""

DEFAULT_BAND: Final = 0
"""The band of cached blocks without an explicit band, least recently freed first: vLLM's LRU order."""

EXPIRED_BAND: Final = -MAX_BAND - 1
"""The band of cached blocks whose retention deadline has passed."""

EMPTY_BAND: Final = -MAX_BAND - 2
"""The band of blocks without content; they are reused first."""


@mypyc_attr(allow_interpreted_subclasses=True)
class BandPolicy(PoolPart):
    """A policy that chooses the bands of freed blocks. A pool has at most one: `BlockPool.open_bands`."""

    def place(self, freed: list[KVCacheBlock]) -> None:
        """Move the blocks that became free to their bands, with `BlockPool.place_in_band`.

        Called at the end of each call that frees blocks. Blocks that became free are then in the default
        band, or at the front of the queue if they have no hash and are not freed by `unpin_blocks`.

        Args:
            freed: blocks that lost a reference, in the order of the call. Some may still be in use.
        """
        raise NotImplementedError

    def note_freed(self, blocks: list[KVCacheBlock], keeps_all: bool) -> None:
        self.place(blocks)


class EvictionOrder:
    """The priority bands of a free queue, lowest first. Blocks of lower bands are reused first.

        head   empty ||  expired ||  -100 ... -1 ||  default ||  1 ... 100 ||  tail       || end of a band

    All bands share one list: its front is the block that is reused next, and calls that take, touch or list
    free blocks ignore bands. The end of a band is a marker in the list. Bands other than the empty and the
    default one have a marker only while they have blocks. A queue without open bands has no markers and no
    extra cost.

    Attributes:
        is_open: whether the queue has bands.
    """

    def __init__(self, queue: FreeKVCacheBlockQueue) -> None:
        self._queue: FreeKVCacheBlockQueue = queue
        self.is_open: bool = False
        self._ends: dict[int, KVCacheBlock] = {}  # the markers that are in the list

    def list_bands(self) -> list[tuple[int, list[KVCacheBlock]]]:
        """Return the bands above the empty one, lowest first, each with its blocks. O(free blocks)."""
        found: list[tuple[int, list[KVCacheBlock]]] = []
        band_of = {end: band for band, end in self._ends.items()}
        blocks: list[KVCacheBlock] = []
        block = self._queue.fake_free_list_head.next_free_block
        while block is not None and block is not self._queue.fake_free_list_tail:
            if block.ref_cnt != BAND_END:
                blocks.append(block)
            else:
                if band_of[block] != EMPTY_BAND:
                    found.append((band_of[block], blocks))
                blocks = []
            block = block.next_free_block
        return found

    def open(self) -> None:
        """Give the queue an empty and a default band. O(free blocks without content)."""
        if not self.is_open:
            self._insert_ends()
            self.is_open = True

    def _insert_ends(self) -> None:
        """Insert the end markers of the empty and the default band into a queue without markers."""
        tail = self._queue.fake_free_list_tail
        first = self._queue.fake_free_list_head.next_free_block
        while first is not None and first is not tail and first.key is None:
            first = first.next_free_block
        assert first is not None
        self._ends = {EMPTY_BAND: _insert_end(first), DEFAULT_BAND: _insert_end(tail)}
        self._queue.append_before = self._ends[DEFAULT_BAND]

    def check_movable(self, blocks: list[KVCacheBlock], band: int) -> None:
        """Raise unless these blocks are free, and the band exists."""
        if not self.is_open:
            raise InvalidArgumentError("the pool has no bands; call open_bands() first")
        if band not in self._ends and not EXPIRED_BAND <= band <= MAX_BAND:
            raise InvalidArgumentError(f"the band is {band}; bands go from {-MAX_BAND} to {MAX_BAND}")
        for block in blocks:
            if block.next_free_block is None or block.prev_free_block is None:
                raise InvalidBlockError(
                    f"block {block.block_id} is in use; only free blocks are moved to a band"
                )

    def find_band_below(self) -> int:
        """Return the band directly below the default one: what is at its back leaves just before that one."""
        below = EMPTY_BAND
        for band in self._ends:
            if below < band < DEFAULT_BAND:
                below = band
        return below

    def move(self, blocks: list[KVCacheBlock], band: int) -> None:
        """Move free blocks to the back of a band, in the given order. O(len(blocks))."""
        end = self._get_or_add_end(band)
        for block in blocks:
            self._move_chain(block, block, end)

    def move_chain(self, first: KVCacheBlock, last: KVCacheBlock, band: int) -> None:
        """Move the chain of adjacent free blocks from `first` to `last` to the back of a band. O(1)."""
        self._move_chain(first, last, self._get_or_add_end(band))

    def _move_chain(self, first: KVCacheBlock, last: KVCacheBlock, end: KVCacheBlock) -> None:
        """Move a chain of adjacent list elements in front of `end`. O(1)."""
        before = first.prev_free_block
        after = last.next_free_block
        back = end.prev_free_block
        assert before is not None
        assert after is not None
        assert back is not None
        if back is last:
            return
        before.next_free_block = after
        after.prev_free_block = before
        first.prev_free_block = back
        last.next_free_block = end
        back.next_free_block = first
        end.prev_free_block = last

    def relink(self, free: list[KVCacheBlock]) -> None:
        """Make the queue contain exactly these blocks, which are not linked, in this order.

        If the order has bands, they open again, and all blocks with content are in the default one.
        """
        queue = self._queue
        link(queue.fake_free_list_head, free, queue.fake_free_list_tail)
        queue.num_free_blocks = len(free)
        queue.append_before = queue.fake_free_list_tail
        if self.is_open:
            self._insert_ends()

    def merge(self) -> None:
        """Merge all bands but the empty one into the default band, in their current order. O(bands)."""
        for band in list(self._ends):
            if band not in (EMPTY_BAND, DEFAULT_BAND):
                self._drop(band)
        if self.is_open:
            default_end = self._ends[DEFAULT_BAND]
            self._move_chain(default_end, default_end, self._queue.fake_free_list_tail)

    def note_all_empty(self) -> None:
        """Move all free blocks to the empty band, since they have lost their content. O(bands)."""
        self.merge()
        if self.is_open:
            empty_end = self._ends[EMPTY_BAND]
            self._move_chain(empty_end, empty_end, self._ends[DEFAULT_BAND])

    def _get_or_add_end(self, band: int) -> KVCacheBlock:
        """Return the marker at the end of a band. Insert it if the band has none: O(bands)."""
        end = self._ends.get(band)
        if end is not None:
            return end
        below = EMPTY_BAND
        for other in list(self._ends):
            before = self._ends[other].prev_free_block
            assert before is not None
            if before.ref_cnt == BAND_END and other not in (EMPTY_BAND, DEFAULT_BAND):
                self._drop(other)  # it has no blocks
            elif below < other < band:
                below = other
        after = self._ends[below].next_free_block
        assert after is not None
        end = _insert_end(after)
        self._ends[band] = end
        return end

    def _drop(self, band: int) -> None:
        """Remove the marker of a band; its blocks become the front of the next band."""
        end = self._ends.pop(band)
        before = end.prev_free_block
        after = end.next_free_block
        assert before is not None
        assert after is not None
        before.next_free_block = after
        after.prev_free_block = before
        end.prev_free_block = None
        end.next_free_block = None


def _insert_end(after: KVCacheBlock) -> KVCacheBlock:
    """Insert a marker in front of a list element, and return it."""
    end = KVCacheBlock(SENTINEL_ID, BAND_END)
    before = after.prev_free_block
    assert before is not None
    end.prev_free_block = before
    end.next_free_block = after
    before.next_free_block = end
    after.prev_free_block = end
    return end
