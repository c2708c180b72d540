"""`KVPoolMigrationManager`: moves sequences of a `GPUKVPool` to other devices and nodes."""

from typing import TypedDict

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockId, NodeName, SequenceId
from kv_pool.migration.messages import SequenceSubject
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.pool_sequences import PoolSequences


class RemoteMigration(TypedDict):
    """The result of a migration: old and new block ids, in the order of the sequence's tokens."""

    old_blocks: list[BlockId]
    new_blocks: list[BlockId]
    target_node: int | NodeName


class KVPoolMigrationManager:
    """Migrates sequences of one pool to other devices and nodes.

        >>> from kv_pool import BlockAllocationRequest, GPUKVPool
        >>> from kv_pool.adapter import KVPoolMigrationManager
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
        local_pool: the source; connected to other pools of this process (`GPUKVPool.connect`), or with other
            nodes attached as devices (`GPUKVPool.attach`).
        migrator: the running migrator of this pool, over a `PoolSite` of it; needed to address nodes by name.
    Raises:
        InvalidArgumentError: the migrator belongs to another pool.
    """

    def __init__(self, local_pool: GPUKVPool, migrator: Migrator | None = None) -> None:
        if migrator is not None:
            sequences = migrator.site.sequences
            if not isinstance(sequences, PoolSequences) or sequences.gpu_pool is not local_pool:
                raise InvalidArgumentError(
                    f"the migrator of node {migrator.name!r} belongs to another pool; give this pool's own"
                )
        self.local_pool = local_pool
        self._migrator = migrator

    def migrate_to_remote(self, sequence_id: SequenceId, target_node_id: int | NodeName) -> RemoteMigration:
        """Move a sequence with its bytes to another pool or node; release it here.

        Args:
            target_node_id: a device id as `GPUKVPool.migrate_blocks` takes it, or a node's name.
        Raises:
            UnknownSequenceError: the sequence holds no blocks.
            UnknownDeviceError: no pool is connected and no node attached as this device.
            InvalidArgumentError: a node is named and there is no migrator, or a pool has no storage.
            FrozenSequenceError: another migration has frozen the sequence.
            MigrationInDoubtError: the sequence has arrived, but it is unknown whether the source released it.
            MigrationError and other errors: nothing has changed on either side.

        Waits for the transfer: do not hold the pool's lock.
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
