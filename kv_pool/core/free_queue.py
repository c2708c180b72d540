"""`FreeKVCacheBlockQueue`: the free blocks in eviction order."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

from mypy_extensions import i64

from kv_pool.core.block import SENTINEL_ID, KVCacheBlock
from kv_pool.errors import (
    CorruptedPoolError,
    InvalidArgumentError,
    InvalidBlockError,
    InvalidTypeError,
    OutOfBlocksError,
)

BAND_END: Final = -1
"""The ref_cnt of the marker at the end of a band. No block has this value."""


class FreeKVCacheBlockQueue:
    """A doubly linked list through the blocks' own links, between two sentinels.

        fake_free_list_head <-> block <-> block <-> ... <-> fake_free_list_tail

    A block is removed from any position in O(1) without an allocation, as a prefix hit on a free block
    needs. Both links of a block outside the queue are None. The queue does not check reference counts, nor
    whether an appended block is already linked: `BlockPool` ensures that a block is linked exactly when its
    ref_cnt is 0 (invariant Q3).

    An `EvictionOrder` divides the queue into bands. The end of each band is a marker in the list with a
    ref_cnt of `BAND_END`. A marker is not a block: methods that return or count blocks skip it.

    Attributes:
        append_before: the marker, or the tail, in front of which `append` and `append_n` insert.

    Args:
        blocks: distinct blocks; the first is reused first. Their links are overwritten.

    Contract: vLLM 0.33 `FreeKVCacheBlockQueue`.
    """

    # A class attribute: if __init__ never ran, compiled code must not read the instance attributes.
    _is_made: bool = False

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        listed: list[KVCacheBlock] = blocks if isinstance(blocks, list) else list(blocks)
        self.num_free_blocks: int = len(listed)
        self.fake_free_list_head: KVCacheBlock = KVCacheBlock(SENTINEL_ID)
        self.fake_free_list_tail: KVCacheBlock = KVCacheBlock(SENTINEL_ID)
        self.append_before: KVCacheBlock = self.fake_free_list_tail
        self._is_made = True
        link(self.fake_free_list_head, listed, self.fake_free_list_tail)

    def __del__(self) -> None:
        # Linked blocks keep each other alive, and compiled blocks are invisible to the cyclic GC.
        # Cut a link only if both ends agree: the blocks may already be in a newer queue.
        if not self._is_made:
            return
        # From both ends, in case the list is broken in between.
        block = self.fake_free_list_tail
        before = block.prev_free_block
        while before is not None and before.next_free_block is block:
            block.prev_free_block = None
            before.next_free_block = None
            block = before
            before = block.prev_free_block
        block = self.fake_free_list_head
        after = block.next_free_block
        while after is not None and after.prev_free_block is block:
            block.next_free_block = None
            after.prev_free_block = None
            block = after
            after = block.next_free_block

    def popleft(self) -> KVCacheBlock:
        """Remove and return the block that is next to be reused. O(1).

        Raises:
            OutOfBlocksError: the queue is empty.
            CorruptedPoolError: no block is linked, but `num_free_blocks` is not 0.
            InvalidBlockError: the link after the first block is missing. In each case nothing has changed.
        """
        block = self.fake_free_list_head.next_free_block
        while block is not None and block.ref_cnt == BAND_END:
            block = block.next_free_block
        if block is None or block is self.fake_free_list_tail:
            if self.num_free_blocks:
                raise CorruptedPoolError(
                    f"num_free_blocks is {self.num_free_blocks} but no block is linked: it is out of sync"
                )
            raise OutOfBlocksError("No free blocks available")
        self.remove(block)
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Remove and return the `n` blocks that are next to be reused, in that order. O(n); 0 gives [].

        Raises:
            InvalidArgumentError: `n` is negative or above `num_free_blocks`. Nothing has changed.
            CorruptedPoolError: fewer blocks are linked than `num_free_blocks` says. Repair the pool.
        """
        if n < 0 or n > self.num_free_blocks:
            raise InvalidArgumentError(f"asked for {n} blocks, {self.num_free_blocks} are in the free queue")
        taken: list[KVCacheBlock] = []
        if n == 0:
            return taken
        front = self.fake_free_list_head  # or the last band marker passed; the taken blocks follow it
        block = front.next_free_block
        while block is not None and len(taken) < n:  # may reach the tail, and end after it
            after = block.next_free_block
            if block.ref_cnt == BAND_END:
                front.next_free_block = block
                block.prev_free_block = front
                front = block
            else:
                block.prev_free_block = None
                block.next_free_block = None
                taken.append(block)
            block = after
        if block is None:  # in a sound queue, at least the tail is left
            raise CorruptedPoolError(
                f"num_free_blocks is {self.num_free_blocks} but fewer blocks are linked: the counter is out "
                "of sync with the queue. Call repair()"
            )
        front.next_free_block = block
        block.prev_free_block = front
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Remove `block` from any position. O(1). The block must be in this queue; this is not checked.

        Raises:
            InvalidBlockError: a link of `block` is None, so it is in no queue. Nothing has changed.
        """
        before = block.prev_free_block
        after = block.next_free_block
        if before is None or after is None:
            raise InvalidBlockError(f"block {block.block_id} is not in the free queue: {block!r}")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = None
        block.next_free_block = None
        self.num_free_blocks -= 1

    def remove_n(self, blocks: list[KVCacheBlock]) -> None:
        """Remove those of these blocks that are linked, from any position. O(len(blocks))."""
        num_removed: i64 = 0
        for block in blocks:
            before = block.prev_free_block
            after = block.next_free_block
            if before is not None and after is not None:
                before.next_free_block = after
                after.prev_free_block = before
                block.prev_free_block = None
                block.next_free_block = None
                num_removed += 1
        self.num_free_blocks -= num_removed

    def append(self, block: KVCacheBlock) -> None:
        """Append `block`, to be reused last. O(1).

        Raises:
            CorruptedPoolError: the tail sentinel is not linked. Nothing has changed.
        """
        tail = self.append_before
        before = tail.prev_free_block
        if before is None:
            raise CorruptedPoolError("the tail of the free queue has no prev_free_block")
        block.prev_free_block = before
        block.next_free_block = tail
        before.next_free_block = block
        tail.prev_free_block = block
        self.num_free_blocks += 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Append `blocks` in the given order; the last one is reused last. O(len(blocks)).

        Raises:
            CorruptedPoolError: a sentinel is not linked.
            InvalidTypeError: an element is not a block. In both cases nothing has changed.
        """
        listed: list[KVCacheBlock] = blocks if isinstance(blocks, list) else list(blocks)
        if not listed:
            return
        self.check_linked()
        link(cast(KVCacheBlock, self.append_before.prev_free_block), listed, self.append_before)
        self.num_free_blocks += len(listed)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Prepend `blocks` in the given order; the first one is reused next. O(len(blocks)).

        Raises:
            CorruptedPoolError: a sentinel is not linked.
            InvalidTypeError: an element is not a block. In both cases nothing has changed.
        """
        listed: list[KVCacheBlock] = blocks if isinstance(blocks, list) else list(blocks)
        if not listed:
            return
        self.check_linked()
        head = self.fake_free_list_head
        link(head, listed, cast(KVCacheBlock, head.next_free_block))
        self.num_free_blocks += len(listed)

    def check_linked(self) -> None:
        """Raise CorruptedPoolError if a sentinel is not linked."""
        if self.fake_free_list_head.next_free_block is None:
            raise CorruptedPoolError("the head of the free queue has no next_free_block")
        if self.append_before.prev_free_block is None:
            raise CorruptedPoolError("the tail of the free queue has no prev_free_block")

    def splice(
        self,
        front_first: KVCacheBlock | None,
        front_last: KVCacheBlock | None,
        num_front: int,
        back_first: KVCacheBlock | None,
        back_last: KVCacheBlock | None,
        num_back: int,
    ) -> None:
        """Prepend one chain of linked blocks and append another; None, None, 0 for no chain. O(1).

        Raises:
            CorruptedPoolError: a sentinel is not linked. Nothing has changed.
        """
        head = self.fake_free_list_head
        tail = self.append_before
        if head.next_free_block is None or tail.prev_free_block is None:
            self.check_linked()
        num_free = self.num_free_blocks + num_front + num_back
        if front_first is not None and front_last is not None:
            after = head.next_free_block
            assert after is not None
            head.next_free_block = front_first
            front_first.prev_free_block = head
            front_last.next_free_block = after
            after.prev_free_block = front_last
        if back_first is not None and back_last is not None:
            before = tail.prev_free_block
            assert before is not None
            before.next_free_block = back_first
            back_first.prev_free_block = before
            back_last.next_free_block = tail
            tail.prev_free_block = back_last
        self.num_free_blocks = num_free

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Return the free blocks, next to be reused first. O(num_free_blocks).

        Raises:
            CorruptedPoolError: a link is missing before the tail.
        """
        tail = self.fake_free_list_tail
        blocks: list[KVCacheBlock] = []
        block = self.fake_free_list_head.next_free_block
        while block is not tail:
            if block is None:
                raise CorruptedPoolError(f"a link is missing in the free queue after {len(blocks)} blocks")
            if block.ref_cnt != BAND_END:
                blocks.append(block)
            block = block.next_free_block
        return blocks

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Iterate over the queue lazily, from the front or from the block after `cursor`.

        The iterator reads the links as it goes, and ends at the tail or at a missing link. A `cursor` that is
        no longer free yields nothing; one that was freed again continues from its new position.
        """
        before = self.fake_free_list_head if cursor is None else cursor
        block = before.next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            if block.ref_cnt != BAND_END:
                yield block
            block = block.next_free_block


def link(before: KVCacheBlock, blocks: list[KVCacheBlock], after: KVCacheBlock) -> None:
    """Link `before`, then `blocks` in order, then `after`.

    Raises:
        InvalidTypeError: an element is not a block. `before` and `after` are linked to each other then.
    """
    last = before
    try:
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
    except (AttributeError, TypeError) as error:
        before.next_free_block = after
        position = 0
        elements: list[Any] = cast(list[Any], blocks)
        for element in elements:
            if not isinstance(element, KVCacheBlock):
                break
            element.prev_free_block = None
            element.next_free_block = None
            position += 1
        raise InvalidTypeError(
            f"the free queue takes blocks; element {position} is a {type(elements[position]).__name__}"
        ) from error
    last.next_free_block = after
    after.prev_free_block = last
