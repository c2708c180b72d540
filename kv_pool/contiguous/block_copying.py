"""`BlockCopying`: copies the bytes of a plan and tracks which bytes are where."""

from collections.abc import Callable, Sequence

from kv_pool.contiguous.move_check import CheckedMoves
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import BlockId, BlockMove

CopyBlocks = Callable[[Sequence[BlockMove]], object]
"""Copies each source's bytes to its target, or queues the copy; raises if that fails.

The moves of one call may be copied in any order: no id is the target of one and part of another. The moves of
a later call are copied after them.
"""


class BlockCopying:
    """Copies the bytes of checked moves: one-way moves first, then exchanges in batches.

        slot              scratch   target   source
        before            -         cached   used
        1st call of copy  cached    cached   used
        2nd call          cached    used     used         `done` from here on
        3rd call          cached    used     cached

    A block in use always has its bytes at one of its two ids, so a failure needs no copy back. A cached block
    may lose its bytes if the second or third call fails.

    Args:
        scratch_ids: scratch slots; as many exchanges are copied at a time.

    Attributes:
        done: moves whose bytes have arrived at the target; for an exchange, the move that was checked.
        endangered: cached blocks whose bytes are lost if a call fails now.
    """

    def __init__(
        self, pool: RunBlockPool, checked: CheckedMoves, copy: CopyBlocks, scratch_ids: Sequence[BlockId]
    ) -> None:
        self.done: list[tuple[BlockId, BlockId]] = []
        self.endangered: list[KVCacheBlock] = []
        self._blocks = pool.blocks
        self._checked = checked
        self._copy = copy
        self._scratch_ids = scratch_ids

    def run(self) -> None:
        """Copy all moves. Any exception of `copy` propagates; `done` and `endangered` are correct then."""
        if self._checked.one_way:
            self._copy(self._checked.one_way)
            self.done.extend(self._checked.one_way)
        exchanges = self._checked.exchanges
        step = len(self._scratch_ids)
        for start in range(0, len(exchanges), step or 1):
            batch = exchanges[start : start + step]
            slots = list(zip(batch, self._scratch_ids, strict=False))
            to_scratch = [BlockMove(target, slot) for (_, target), slot in slots]
            from_scratch = [BlockMove(slot, source) for (source, _), slot in slots]
            endangered = [self._blocks[target] for _, target in batch]
            self._copy(to_scratch)
            self.endangered = endangered
            self._copy(batch)
            self.done.extend(batch)
            self._copy(from_scratch)
            self.endangered = []
