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
    """Moves sequences of one pool to other nodes.

    Args:
        migrator: of the pool, over a `PoolSite` of it; running.
    Raises:
        InvalidArgumentError: the migrator is another pool's.
    """

    def __init__(self, local_pool: GPUKVPool, migrator: Migrator) -> None:
        sequences = migrator.site.sequences
        if not isinstance(sequences, PoolSequences) or sequences.gpu_pool is not local_pool:
            raise InvalidArgumentError(
                f"node {migrator.name!r} is over another pool; give the migrator of this one"
            )
        self.local_pool = local_pool
        self._migrator = migrator

    def migrate_to_remote(self, sequence_id: int, target_node_id: int | str) -> RemoteMigration:
        """Move a sequence with its bytes to another node; it is free here when this returns.

        Args:
            target_node_id: the node's name, or its device id as given to `GPUKVPool.attach`.
        Raises:
            UnknownSequenceError: it holds nothing.
            UnknownDeviceError: no node is attached as this device.
            FrozenSequenceError: another migration has the sequence.
            MigrationInDoubtError: the sequence has arrived, but it is not known whether it was given up here.
            MigrationError and what else went wrong: nothing has changed on either side.

        It takes as long as the bytes do; do not hold the pool's lock meanwhile.
        """
        if isinstance(target_node_id, int):
            target = self.local_pool.get_attached_node(target_node_id)
        else:
            target = target_node_id
        migration = self._migrator.migrate(SequenceSubject(sequence_id), target)
        new_blocks = migration.wait()
        return {"old_blocks": migration.old_ids, "new_blocks": new_blocks, "target_node": target_node_id}
