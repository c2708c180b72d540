"""`LocalMove`: blocks move from one pool of this process to another, without messages."""

from kv_pool.ids import BlockId, BlockMove, NodeName
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.site import Reservation
from kv_pool.migration.subjects import Subject


class LocalMove:
    """A move of blocks between two pools of this process. The caller holds both locks."""

    def __init__(self, source: PoolSite, target: PoolSite, subject: Subject, target_name: NodeName) -> None:
        self.source = source
        self.target = target
        self.subject = subject
        self.target_name = target_name
        self._reservation: Reservation | None = None
        self._is_undone = False

    def is_whole(self) -> bool:
        """Return False if a call of one of the pools was interrupted."""
        return not (self.source.pool.is_changing or self.target.pool.is_changing)

    def mark_interrupted(self) -> None:
        """Let both pools refuse calls until `repair`, since the move is neither done nor undone."""
        self.source.pool.is_changing = True
        self.target.pool.is_changing = True

    def run(self) -> tuple[list[BlockId], list[BlockId]]:
        """Copy the blocks and pass them to the target. `end` does the rest, whether this raises or not.

        Returns:
            The block ids at the source and at the target.
        Raises:
            As `GPUKVPool.migrate_blocks`.
        """
        source, target = self.source, self.target
        selection = source.select(self.subject, for_move=True)
        old_ids = [block.block_id for block in selection.blocks]
        reservation = target.reserve(self.subject, selection.offered, selection.state)
        self._reservation = reservation
        new_ids = [block.block_id for block in reservation.blocks]
        moves = [BlockMove(old_ids[position], new_ids[position]) for position in reservation.missing]
        source.storage.copy_to(target.storage, moves)
        # The old blocks may be reused as soon as this returns, by work on other streams.
        target.storage.synchronize()
        source.freeze(self.subject)
        target.insert(reservation)
        target.adopt(reservation)
        return old_ids, new_ids

    def end(self) -> None:
        """Release the subject at the source if the target has adopted it, else undo the move. Repeatable."""
        reservation = self._reservation
        if reservation is None:
            return
        if reservation.is_ended and not self._is_undone:
            self.source.release(self.subject, self.target_name)
        else:
            self._is_undone = True
            self.target.release_reservation(reservation)
            self.source.thaw(self.subject)
