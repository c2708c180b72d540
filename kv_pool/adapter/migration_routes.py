"""`MigrationRoutes`: the pools and nodes to which the blocks of a `GPUKVPool` can migrate."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kv_pool.errors import InvalidArgumentError, UnknownDeviceError
from kv_pool.ids import BlockId, NodeName, SequenceId
from kv_pool.migration.messages import BlocksSubject, SequenceSubject, Subject
from kv_pool.migration.pool_sequences import PoolSequences, SitePool
from kv_pool.migration.pool_site import LocalMove, PoolSite
from kv_pool.protocol import NORMAL

if TYPE_CHECKING:  # at run time only a pool with a storage or a migrator imports them
    from kv_pool.migration.migrator import Migrator


class MigrationRoutes:
    """The connected pools of this process, and the nodes attached as devices."""

    def __init__(self, pool: SitePool) -> None:
        self._pool = pool
        self._site: PoolSite | None = None
        self._peers: dict[int, MigrationRoutes] = {}
        self._nodes: dict[int, tuple[Migrator, NodeName]] = {}
        self._moves: list[LocalMove] = []  # those that have not ended: a pool of theirs was interrupted

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

    def count_free(self) -> dict[int, int]:
        """See `GPUKVPool.count_free_elsewhere`."""
        return {device_id: peer._pool.count_available(NORMAL) for device_id, peer in self._peers.items()}

    def migrate(self, block_ids: Sequence[BlockId], device_id: int) -> list[BlockId]:
        """See `GPUKVPool.migrate_blocks`."""
        with self._pool.lock:
            blocks, _ = self._pool.holdings.find_named(block_ids, None)
            subject = BlocksSubject(tuple(block_ids), tuple(block.generation for block in blocks))
        if not block_ids and device_id in self._nodes:
            return []
        return self._move(subject, device_id)[1]

    def migrate_sequence(
        self, sequence_id: SequenceId, device_id: int
    ) -> tuple[list[BlockId], list[BlockId]]:
        """See `GPUKVPool.migrate_sequence`."""
        return self._move(SequenceSubject(sequence_id), device_id)

    def _move(self, subject: Subject, device_id: int) -> tuple[list[BlockId], list[BlockId]]:
        """Move blocks to a pool or a node; return their old and new ids."""
        self._check_connected(device_id, {*self._peers, *self._nodes})
        if device_id in self._nodes:
            migrator, name = self._nodes[device_id]
            migration = migrator.migrate(subject, name)
            new_ids = migration.wait()
            return migration.old_ids, new_ids
        peer = self._peers[device_id]
        with self._lock_both(peer):
            move = LocalMove(self.open_site(), peer.open_site(), subject, NodeName(f"device {device_id}"))
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
            self._site = PoolSite(PoolSequences(self._pool))
        return self._site

    def _check_connected(self, device_id: int, devices: Container[int]) -> None:
        if device_id not in devices:
            own_id = self._pool.device_id
            what = "the pool's own" if device_id == own_id else f"not connected to device {own_id}"
            raise UnknownDeviceError(
                f"device {device_id!r} is {what}; the connected devices are "
                f"{sorted({*self._peers, *self._nodes})}. See connect() and attach()."
            )
