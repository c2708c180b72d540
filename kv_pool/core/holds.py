"""`BlockHolds`: which blocks of a pool keep their ids, and for what reason."""

from collections.abc import Container, Iterable
from typing import Any

from kv_pool.core.arguments import as_list_of
from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import InvalidArgumentError, InvalidBlockError


class Hold:
    """Blocks that keep their ids until `release`. Made by `BlockPool.hold`.

    A hold takes no references: its owner has one on each block, and releases the hold before, or together
    with, the last of them. As a context manager it is released at the end of the block.

    Attributes:
        reason: completes "the block is ..." in error messages: "lent to prefill worker 3 (write)".
    """

    def __init__(self, book: "BlockHolds", blocks: list[KVCacheBlock], reason: str) -> None:
        self.reason: str = reason
        self._book: BlockHolds = book
        # Those to be added to `_blocks` when it is read, which most holds are released before.
        self._added: list[KVCacheBlock] = blocks
        self._blocks: dict[KVCacheBlock, Any] = {}

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """The distinct blocks, without null blocks, in the order in which they were added."""
        return list(self._keyed())

    @property
    def is_released(self) -> bool:
        return self not in self._book._open

    def add(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold these blocks as well.

        Raises:
            As `BlockPool.hold`; and InvalidArgumentError after `release`. Nothing has changed.
        """
        self._check_open()
        listed = as_list_of("blocks", blocks, KVCacheBlock)
        self._keyed().update(dict.fromkeys(self._book.check_holdable(listed, self.reason)))

    def remove(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold these blocks no longer; blocks that this hold does not contain are ignored."""
        held = self._keyed()
        for block in blocks:
            held.pop(block, None)

    def release(self) -> None:
        """End the hold; compaction may move the blocks from now on.

        Raises:
            InvalidArgumentError: the hold was released before. Nothing has changed.
        """
        self._check_open()
        del self._book._open[self]

    def _keyed(self) -> dict[KVCacheBlock, Any]:
        """Return the distinct blocks, in order."""
        if self._added:
            self._blocks.update(dict.fromkeys(self._added))
            self._added = []
        return self._blocks

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        self.release()

    def _check_open(self) -> None:
        if self not in self._book._open:
            raise InvalidArgumentError(f"{self!r} was released before")

    def __repr__(self) -> str:
        return f"Hold({self.reason!r}, {len(self._keyed())} blocks)"


class BlockHolds:
    """The holds on one pool's blocks: `BlockPool.holds`.

    Planning, checking and applying of moves read it, so that no caller has to list the blocks that are lent,
    reserved or in flight. A pool without holds pays nothing.

    Args:
        owner: the weak reference to the pool that its blocks share.

    The open holds are all its state: one dictionary entry opens a hold, and removing it releases the hold.
    """

    def __init__(self, owner: Any) -> None:
        self._owner: Any = owner
        self._open: dict[Hold, None] = {}

    def list_holds(self) -> list[Hold]:
        """Open holds, oldest first."""
        return list(self._open)

    def list_ids(self) -> list[int]:
        """Ids of held blocks, once for each hold, oldest hold first. O(held blocks)."""
        return [block.block_id for hold in self._open for block in hold._keyed()]

    def list_reasons(self, block: KVCacheBlock) -> list[str]:
        """The reasons for which a block keeps its id, oldest first; [] if it may move. O(holds)."""
        return [hold.reason for hold in self._open if block in hold._keyed()]

    def open(self, blocks: list[KVCacheBlock], reason: str) -> Hold:
        """See `BlockPool.hold`."""
        return self.open_onto(blocks, reason, [])

    def open_onto(self, blocks: list[KVCacheBlock], reason: str, onto: list[Hold]) -> Hold:
        """As `BlockPool.hold`; the hold is appended to `onto` in the same step.

        Whatever interrupts the caller, `onto` says which holds it has to release.
        """
        hold = Hold(self, self.check_holdable(blocks, reason), reason)
        opened = [hold]
        self._open[hold] = None
        onto += opened
        return hold

    def open_keys(self, blocks: dict[KVCacheBlock, Any], reason: str) -> Hold:
        """Hold the keys of a dictionary, for as long as each is in it. Its owner has checked them."""
        hold = Hold(self, [], reason)
        hold._blocks = blocks
        self._open[hold] = None
        return hold

    def check_holdable(self, blocks: list[KVCacheBlock], reason: str) -> list[KVCacheBlock]:
        """Return the blocks without null blocks, as a new list. Raises what `BlockPool.hold` says."""
        owner = self._owner
        has_nulls = False
        for block in blocks:
            if block.is_null:
                has_nulls = True
            elif block._owner is not owner or block.ref_cnt < 1:
                why = "free" if block._owner is owner else "not one of this pool"
                raise InvalidBlockError(
                    f"block {block.block_id} is {why} and cannot be held as {reason}; take or touch it first"
                )
        return [block for block in blocks if not block.is_null] if has_nulls else blocks.copy()

    def check_movable(self, block_ids: Container[int], what: str = "cannot be moved") -> None:
        """Raise InvalidBlockError for the first held block among these ids. O(held blocks)."""
        for hold in self._open:
            for block in hold._keyed():
                if block.block_id in block_ids:
                    raise InvalidBlockError(
                        f"C3: block {block.block_id} is {' and '.join(self.list_reasons(block))}: it {what} "
                        "before that has ended"
                    )
