"""`MigrationRoutes`: where blocks of a pool can go, by device id, and how they get there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kv_pool.adapter.pool_sequences import PoolSequences, SitePool
from kv_pool.errors import InvalidArgumentError, UnknownDeviceError
from kv_pool.ids import BlockMove
from kv_pool.protocol import NORMAL

if TYPE_CHECKING:
    from kv_pool.migration.migrator import Migrator
    from kv_pool.migration.pool_site import PoolSite
    from kv_pool.migration.subjects import Subject


class MigrationRoutes:
    """Connected pools of this process, and devices that are other nodes."""

    def __init__(self, pool: SitePool) -> None:
        self._pool = pool
        self._site: PoolSite | None = None
        self._peers: dict[int, MigrationRoutes] = {}
        self._nodes: dict[int, tuple[Migrator, str]] = {}

    def connect(self, peer: MigrationRoutes) -> None:
        """Connect to the pool of these routes. See `GPUKVPool.connect`."""
        for here, other in ((self, peer), (peer, self)):
            device_id = other._pool.device_id
            known = here._peers.get(device_id, other)
            if device_id == here._pool.device_id or known is not other or device_id in here._nodes:
                raise InvalidArgumentError(f"device {device_id} is known here already")
        here_size, there_size = self._pool.block_size, peer._pool.block_size
        if there_size != here_size:
            raise InvalidArgumentError(f"blocks of {here_size} tokens here, {there_size} there")
        self._peers[peer._pool.device_id] = peer
        peer._peers[self._pool.device_id] = self

    def attach(self, migrator: Migrator, devices: dict[int, str]) -> None:
        """See `GPUKVPool.attach`."""
        for device_id in devices:
            if device_id == self._pool.device_id or device_id in self._peers:
                raise InvalidArgumentError(f"device {device_id} is known here already")
        self._nodes.update({device_id: (migrator, name) for device_id, name in devices.items()})

    def get_node(self, device_id: int) -> str:
        """The name of the node that a device is. Raises UnknownDeviceError."""
        if device_id not in self._nodes:
            self._refuse(device_id)
        return self._nodes[device_id][1]

    def count_free(self) -> dict[int, int]:
        """See `GPUKVPool.count_free_elsewhere`."""
        return {device_id: peer._pool.count_available(NORMAL) for device_id, peer in self._peers.items()}

    def migrate(self, block_ids: Sequence[int], device_id: int) -> list[int]:
        """See `GPUKVPool.migrate_blocks`."""
        from kv_pool.migration.subjects import BlocksSubject

        if device_id in self._peers:
            return self._move_to_peer(BlocksSubject(tuple(block_ids)), device_id)[1]
        if device_id not in self._nodes:
            self._refuse(device_id)
        if not block_ids:
            return []
        migrator, name = self._nodes[device_id]
        with self._pool.lock:
            blocks = self._pool.holdings.find_held(block_ids)
            generations = tuple(block.generation for block in blocks)
        return migrator.migrate(BlocksSubject(tuple(block_ids), generations), name).wait()

    def migrate_sequence(self, sequence_id: int, device_id: int) -> tuple[list[int], list[int]]:
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

    def _move_to_peer(self, subject: Subject, device_id: int) -> tuple[list[int], list[int]]:
        peer = self._peers[device_id]
        # Always in this order.
        with ExitStack() as locks:
            for pool in sorted((self._pool, peer._pool), key=lambda pool: pool.device_id):
                locks.enter_context(pool.lock)
            return move_subject(self.find_site(), peer.find_site(), subject, f"device {device_id}")

    def find_site(self) -> PoolSite:
        """The site through which blocks come and go within this process."""
        if self._site is None:
            from kv_pool.migration.pool_site import PoolSite

            self._site = PoolSite(PoolSequences(self._pool))
        return self._site

    def _refuse(self, device_id: int) -> None:
        raise UnknownDeviceError(
            f"device {device_id!r} is not connected to device {self._pool.device_id}; "
            f"connected are {sorted({*self._peers, *self._nodes})}. See connect() and attach()."
        )


def move_subject(
    source: PoolSite, target: PoolSite, subject: Subject, target_name: str
) -> tuple[list[int], list[int]]:
    """Move blocks between two pools of this process in one step, with both locks held.

    Returns:
        Their ids at the source and at the target.
    Raises:
        As `GPUKVPool.migrate_blocks`.
    """
    selection = source.select(subject, for_move=True)
    old_ids = [block.block_id for block in selection.blocks]
    room = target.take_room(subject, selection.offered, selection.state)
    new_ids = [block.block_id for block in room.blocks]
    try:
        moves = [BlockMove(old_ids[position], new_ids[position]) for position in room.missing]
        source.storage.copy_to(target.storage, moves)
        # The old ids may be taken on return, by work that is queued elsewhere.
        target.storage.synchronize()
    except BaseException:
        target.leave(room)
        raise
    source.freeze(subject)
    target.insert(room)
    target.adopt(room)
    source.release(subject, target_name)
    return old_ids, new_ids
