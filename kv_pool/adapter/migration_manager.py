"""`KVPoolMigrationManager`: moves a sequence to another node and says which blocks became which."""

from __future__ import annotations

from typing import TypedDict

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.adapter.pool_sequences import PoolSequences
from kv_pool.errors import InvalidArgumentError
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.subjects import SequenceSubject


class RemoteMigration(TypedDict):
    """What came of it: block ids here, and those there, in the order of the sequence's tokens."""

    old_blocks: list[int]
    new_blocks: list[int]
    target_node: int | str


class KVPoolMigrationManager:
    """Moves sequences of one pool to other devices and nodes.

        >>> from kv_pool import BlockAllocationRequest, GPUKVPool
        >>> from kv_pool.adapter.migration_manager import KVPoolMigrationManager
        >>> from kv_pool.storage import KVStorage
        >>> here, there = (
        ...     GPUKVPool(8, 4, device_id=device_id, storage=KVStorage.allocate(9, 4, 1, 1, 4))
        ...     for device_id in (0, 1)
        ... )
        >>> here.connect(there)
        >>> _ = here.allocate(BlockAllocationRequest(num_blocks=2, sequence_id=123))
        >>> _ = KVPoolMigrationManager(here).migrate_to_remote(sequence_id=123, target_node_id=1)
        >>> here.list_sequences(), there.list_sequences()
        ([], [123])

    Args:
        local_pool: connected to other pools of this process (`GPUKVPool.connect`), or with other nodes
            attached as devices (`GPUKVPool.attach`).
        migrator: of the pool, over a `PoolSite` of it; running. With it nodes can be named, too.
    Raises:
        InvalidArgumentError: the migrator is another pool's.
    """

    def __init__(self, local_pool: GPUKVPool, migrator: Migrator | None = None) -> None:
        if migrator is not None:
            sequences = migrator.site.sequences
            if not isinstance(sequences, PoolSequences) or sequences.gpu_pool is not local_pool:
                raise InvalidArgumentError(
                    f"node {migrator.name!r} is over another pool; give the migrator of this one"
                )
        self.local_pool = local_pool
        self._migrator = migrator

    def migrate_to_remote(self, sequence_id: int, target_node_id: int | str) -> RemoteMigration:
        """Move a sequence with its bytes to another pool or node; it is free here when this returns.

        Args:
            target_node_id: a device's id as `GPUKVPool.migrate_blocks` takes it, or the node's name.
        Raises:
            UnknownSequenceError: it holds nothing.
            UnknownDeviceError: no pool is connected, no node attached as this device.
            InvalidArgumentError: a node is named and there is no migrator, or a pool has no storage.
            FrozenSequenceError: another migration has the sequence.
            MigrationInDoubtError: the sequence has arrived, but it is not known whether it was given up here.
            MigrationError and what else went wrong: nothing has changed on either side.

        It takes as long as the bytes do; do not hold the pool's lock meanwhile.
        """
        if isinstance(target_node_id, str):
            if self._migrator is None:
                raise InvalidArgumentError(
                    f"node {target_node_id!r} is reached through a migrator; give one, or name a device id"
                )
            migration = self._migrator.migrate(SequenceSubject(sequence_id), target_node_id)
            new_blocks = migration.wait()
            old_blocks = migration.old_ids
        else:
            old_blocks, new_blocks = self.local_pool.migrate_sequence(sequence_id, target_node_id)
        return {"old_blocks": old_blocks, "new_blocks": new_blocks, "target_node": target_node_id}
