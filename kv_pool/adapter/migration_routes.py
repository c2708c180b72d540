"""`MigrationRoutes`: the devices that blocks of a pool can migrate to, and the way to each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kv_pool.adapter.pool_sequences import PoolSequences, SitePool
from kv_pool.errors import InvalidArgumentError, UnknownDeviceError
from kv_pool.ids import BlockId, BlockMove, NodeName, SequenceId
from kv_pool.protocol import NORMAL

if TYPE_CHECKING:
    from kv_pool.migration.migrator import Migrator
    from kv_pool.migration.pool_site import PoolSite
    from kv_pool.migration.site import Reservation
    from kv_pool.migration.subjects import Subject


class MigrationRoutes:
    """The connected pools of this process, and the nodes attached as devices."""

    def __init__(self, pool: SitePool) -> None:
        self._pool = pool
        self._site: PoolSite | None = None
        self._peers: dict[int, MigrationRoutes] = {}
        self._nodes: dict[int, tuple[Migrator, NodeName]] = {}
        self._moves: list[_Move] = []  # those that have not ended: a pool of theirs was interrupted

    def connect(self, peer: MigrationRoutes) -> None:
        """Connect to the pool of these routes. See `GPUKVPool.connect`."""
        for here, other in ((self, peer), (peer, self)):
            device_id = other._pool.device_id
            known = here._peers.get(device_id, other)
            if device_id == here._pool.device_id or known is not other or device_id in here._nodes:
                raise InvalidArgumentError(f"device {device_id} is already connected")
        here_size, there_size = self._pool.block_size, peer._pool.block_size
        if there_size != here_size:
            raise InvalidArgumentError(f"the block size is {here_size} here and {there_size} at the peer")
        self._peers[peer._pool.device_id] = peer
        peer._peers[self._pool.device_id] = self

    def attach(self, migrator: Migrator, devices: dict[int, NodeName]) -> None:
        """See `GPUKVPool.attach`."""
        for device_id in devices:
            if device_id == self._pool.device_id or device_id in self._peers:
                raise InvalidArgumentError(f"device {device_id} is already connected")
        self._nodes.update({device_id: (migrator, name) for device_id, name in devices.items()})

    def get_node(self, device_id: int) -> NodeName:
        """Return the name of the node attached as this device. Raises UnknownDeviceError."""
        if device_id not in self._nodes:
            self._refuse(device_id)
        return self._nodes[device_id][1]

    def count_free(self) -> dict[int, int]:
        """See `GPUKVPool.count_free_elsewhere`."""
        return {device_id: peer._pool.count_available(NORMAL) for device_id, peer in self._peers.items()}

    def migrate(self, block_ids: Sequence[BlockId], device_id: int) -> list[BlockId]:
        """See `GPUKVPool.migrate_blocks`."""
        from kv_pool.migration.subjects import BlocksSubject

        if device_id not in self._peers and device_id not in self._nodes:
            self._refuse(device_id)
        with self._pool.lock:
            blocks, _ = self._pool.holdings.find_named(block_ids, None)
            subject = BlocksSubject(tuple(block_ids), tuple(block.generation for block in blocks))
        if device_id in self._peers:
            return self._move_to_peer(subject, device_id)[1]
        if not block_ids:
            return []
        migrator, name = self._nodes[device_id]
        return migrator.migrate(subject, name).wait()

    def migrate_sequence(
        self, sequence_id: SequenceId, device_id: int
    ) -> tuple[list[BlockId], list[BlockId]]:
        """See `GPUKVPool.migrate_sequence`."""
        from kv_pool.migration.subjects import SequenceSubject

        if device_id in self._peers:
            return self._move_to_peer(SequenceSubject(sequence_id), device_id)
        if device_id not in self._nodes:
            self._refuse(device_id)
        migrator, name = self._nodes[device_id]
        migration = migrator.migrate(SequenceSubject(sequence_id), name)
        new_ids = migration.wait()
        return migration.old_ids, new_ids

    def _move_to_peer(self, subject: Subject, device_id: int) -> tuple[list[BlockId], list[BlockId]]:
        peer = self._peers[device_id]
        with self._lock_both(peer):
            move = _Move(self.open_site(), peer.open_site(), subject, NodeName(f"device {device_id}"))
            self._moves.append(move)
            try:
                return move.run()
            finally:
                try:
                    self._end_moves()
                except BaseException:
                    move.mark_interrupted()
                    raise

    def repair(self) -> None:
        """End the moves from and to this pool that were interrupted, as far as both pools are whole."""
        for peer in self._peers.values():
            with self._lock_both(peer):
                self._end_moves()
                peer._end_moves()

    def _end_moves(self) -> None:
        for move in self._moves.copy():
            if move.is_whole():
                move.end()
                self._moves.remove(move)

    def _lock_both(self, peer: MigrationRoutes) -> ExitStack:
        """Lock both pools, always in the same order, so that two migrations cannot deadlock."""
        with ExitStack() as locks:
            for pool in sorted((self._pool, peer._pool), key=lambda pool: pool.device_id):
                locks.enter_context(pool.lock)
            return locks.pop_all()

    def open_site(self) -> PoolSite:
        """Return the site that migrates blocks within this process; the first call creates it."""
        if self._site is None:
            from kv_pool.migration.pool_site import PoolSite

            self._site = PoolSite(PoolSequences(self._pool))
        return self._site

    def _refuse(self, device_id: int) -> None:
        raise UnknownDeviceError(
            f"device {device_id!r} is not connected to device {self._pool.device_id}; the connected devices "
            f"are {sorted({*self._peers, *self._nodes})}. See connect() and attach()."
        )


class _Move:
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
