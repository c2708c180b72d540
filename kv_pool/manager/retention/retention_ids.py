"""`RetentionIds`: short numbers by which blocks name what a retention knows of them."""

from typing import Any

from kv_pool.core.block import KVCacheBlock


class RetentionIds:
    """Numbers from 1 on, each for a `Batch` or a `Cover`, used again when that is gone.

    A block has its number in `_retention_id`, where a reference would make it part of a cycle, and an entry
    in a dict would cost what a look at four bytes does not. 0: nothing is known of the block. Below 0: of
    what it held before it got another hash.
    """

    def __init__(self) -> None:
        self.things: list[Any] = [None]
        self._unused: list[int] = []

    def add(self, thing: Any) -> int:
        """The number that is this thing's from now on."""
        if self._unused:
            retention_id = self._unused.pop()
            self.things[retention_id] = thing
            return retention_id
        self.things.append(thing)
        return len(self.things) - 1

    def find(self, block: KVCacheBlock) -> Any:
        """What the block's number stands for, void or not; None for 0."""
        retention_id = block._retention_id
        return self.things[-retention_id if retention_id < 0 else retention_id]

    def remove(self, retention_id: int) -> None:
        """No block has this number any more."""
        self.things[retention_id] = None
        self._unused.append(retention_id)

    def rebuild(self, blocks: tuple[KVCacheBlock, ...]) -> None:
        """Make every number available again that no block of the pool has."""
        used: set[int] = set()
        for block in blocks:
            retention_id: int = block._retention_id
            used.add(-retention_id if retention_id < 0 else retention_id)
        unused: list[int] = []
        for retention_id in range(1, len(self.things)):
            if retention_id not in used:
                self.things[retention_id] = None
                unused.append(retention_id)
        self._unused = unused


def is_any_known(blocks: list[KVCacheBlock]) -> bool:
    """Does a retention know something of any of these blocks?"""
    for block in blocks:  # noqa: SIM110 (a loop compiles to C, a generator does not)
        if block._retention_id != 0:
            return True
    return False
