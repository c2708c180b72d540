"""Sequences leave for other pools and nodes: `MigrationHook` when the pool is full, or by a call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypedDict

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.adapter.pool_sequences import PoolSequences
from kv_pool.core.arguments import as_count
from kv_pool.errors import InvalidArgumentError, KVPoolError, MigrationInDoubtError, PeerUnavailableError
from kv_pool.ids import BlockId, NodeName, SequenceId
from kv_pool.migration.messages import NodeDescription
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.subjects import SequenceSubject
from kv_pool.migration.topology import Ranking, Topology, find_nearness
from kv_pool.protocol import BlockAllocationRequest
from kv_pool.reports.sequences import SequenceList

_logger = logging.getLogger(__name__)


class MigratablePool(Protocol):
    """A pool whose sequences can migrate, such as `GPUKVPool` and `ControlledManager`."""

    def get_free_blocks(self) -> int:
        """Return how many blocks are free."""

    def describe_sequences(self) -> SequenceList:
        """Return a report on each sequence."""

    def list_victims(self, num_blocks: int) -> Sequence[Any]:
        """Return the sequences to evict for `num_blocks` more free blocks, in eviction order."""


class MigrationHook:
    """A `migration_hook` for `GPUKVPool` that migrates sequences while too few blocks are free.

        hook = MigrationHook(topology)
        pool = GPUKVPool(..., migration_hook=hook, migration_threshold=64)
        hook.use(pool, migrator)

    The pool calls the hook before a request would leave fewer than `migration_threshold` blocks free, so
    sequences migrate instead of being evicted. Without a threshold the pool evicts first; with
    `eviction_policy=None` it calls the hook for requests that it would refuse. An engine that holds the
    pool's lock during a step calls `keep_free` between steps instead.

    The pool's eviction policy ranks the sequences to migrate, or LRU if it has none. `on_evicted` is not
    called for them. Targets are, in this order: connected pools, most free blocks first (copied in memory,
    without sockets); then nodes, the cheapest by the topology first. The threshold also applies at the
    target, so that two full pools do not migrate to each other; a request that finds too few free blocks
    ignores it there.

    Args:
        nodes: names of the nodes to ask; None for all nodes that the migrator knows.
        timeout_s: time limit for one sequence; then its migration is cancelled.
        ask_timeout_s: time limit for a node to report its free blocks.
        retry_s: how long the hook stays idle after it failed to reach a threshold. Requests that find too few
            free blocks are not affected.
        on_migrated: called with a sequence's id and its new device id or node name, by the calling thread;
            the pool is not locked. A `SequenceOwner` is also notified.
        clock: returns seconds.

    Attributes:
        last_ranking: the ranking of the nodes for the last sequence, with reasons, cheapest first; None
            before the first.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        *,
        nodes: Sequence[NodeName] | None = None,
        timeout_s: float = 30.0,
        ask_timeout_s: float = 2.0,
        retry_s: float = 1.0,
        on_migrated: Callable[[Any, int | NodeName], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topology = Topology() if topology is None else topology
        self.last_ranking: Ranking | None = None
        self._nodes = None if nodes is None else list(nodes)
        self._timeout_s = timeout_s
        self._ask_timeout_s = ask_timeout_s
        self._retry_s = retry_s
        self._on_migrated = on_migrated
        self._clock = clock
        self._idle_until_s = float("-inf")
        self._pool: MigratablePool | None = None
        self._migrator: Migrator | None = None

    def use(self, pool: MigratablePool, migrator: Migrator | None = None) -> None:
        """Migrate this pool's sequences through its migrator; with None only to connected pools.

        Before this call the hook does nothing.
        """
        self._pool, self._migrator = pool, migrator

    def __call__(self, request: BlockAllocationRequest, num_missing: int) -> None:
        """Migrate sequences until `num_missing` more blocks are free, or no target takes another sequence.

        Waits for the transfers: the caller must not hold the pool's lock. Does not raise `KVPoolError`:
        sequences that could not migrate stay, and the reason is logged.
        """
        pool = self._pool
        if not isinstance(pool, GPUKVPool):
            return
        is_urgent = pool.count_available(request.priority) < request.num_blocks
        num_spare = 0 if is_urgent else pool.migration_threshold
        if is_urgent or self._clock() >= self._idle_until_s:
            victims = pool.list_victims(num_missing, request.priority, request.sequence_id)
            self._move_away(pool, victims, num_missing, num_spare)

    def keep_free(self, num_blocks: int) -> int:
        """Migrate sequences while fewer than `num_blocks` blocks are free. Otherwise like calling the hook.

        Returns:
            How many sequences migrated; 0 for `retry_s` after a call that did not reach `num_blocks`.
        """
        num_blocks = as_count("num_blocks", num_blocks)
        if self._pool is None or self._clock() < self._idle_until_s:
            return 0
        num_missing = num_blocks - self._pool.get_free_blocks()
        if num_missing <= 0:
            return 0
        return self._move_away(self._pool, self._pool.list_victims(num_missing), num_missing, num_blocks)

    def _move_away(
        self, pool: MigratablePool, victims: Sequence[Any], num_missing: int, num_spare: int
    ) -> int:
        """Migrate sequences until `num_missing` more blocks are free; return how many migrated.

        Args:
            num_spare: blocks that must still be free at a target afterwards.
        """
        num_wanted = pool.get_free_blocks() + num_missing
        num_moved = 0
        nodes: list[NodeDescription] | None = None
        sizes = {one.sequence_id: one.num_blocks for one in pool.describe_sequences().sequences}
        for sequence_id in victims:
            if pool.get_free_blocks() >= num_wanted:
                return num_moved
            num_blocks = sizes.get(sequence_id, 0)
            target: int | NodeName | None = self._move_to_pool(pool, sequence_id, num_blocks + num_spare)
            if target is None and self._migrator is not None:
                if nodes is None:
                    nodes = self._ask_nodes(self._migrator)
                target = self._move_to_node(self._migrator, sequence_id, num_blocks, num_spare, nodes)
                if target is not None:
                    nodes = None  # outdated: the target has fewer free blocks now
            if target is not None:
                num_moved += 1
                if self._on_migrated is not None:
                    self._on_migrated(sequence_id, target)
        if pool.get_free_blocks() < num_wanted:
            self._idle_until_s = self._clock() + self._retry_s
        return num_moved

    def _move_to_pool(self, pool: MigratablePool, sequence_id: Any, num_blocks: int) -> int | None:
        """Move a sequence to a connected pool with `num_blocks` free; return the device id or None."""
        if not isinstance(pool, GPUKVPool):
            return None
        num_free = pool.count_free_elsewhere()
        for device_id in sorted(num_free, key=lambda device_id: (-num_free[device_id], device_id)):
            if num_free[device_id] < num_blocks:
                break
            try:
                pool.migrate_sequence(sequence_id, device_id)
            except KVPoolError as error:
                _logger.info("sequence %s was not moved to device %d: %s", sequence_id, device_id, error)
            else:
                return device_id
        return None

    def _ask_nodes(self, migrator: Migrator) -> list[NodeDescription]:
        found = []
        for name in migrator.list_node_names() if self._nodes is None else self._nodes:
            if name == migrator.name:
                continue
            try:
                found.append(migrator.ask(name, self._ask_timeout_s))
            except PeerUnavailableError as error:
                _logger.info("node %s cannot take sequences: %s", name, error)
        return found

    def _move_to_node(
        self,
        migrator: Migrator,
        sequence_id: Any,
        num_blocks: int,
        num_spare: int,
        nodes: Sequence[NodeDescription],
    ) -> NodeName | None:
        """Move a sequence to the first node that accepts it; return the node's name or None."""
        ranking = self.topology.rank(
            migrator.location,
            num_blocks * migrator.site.storage.block_bytes,
            num_blocks + num_spare,
            nodes,
            layout=migrator.site.layout,
            sequence_kind=migrator.site.sequences.kind,
        )
        self.last_ranking = ranking
        for target in ranking.targets:
            try:
                migration = migrator.migrate(SequenceSubject(sequence_id), target.name)
                migration.wait(self._timeout_s)
            except TimeoutError:
                if migration.cancel():
                    _logger.warning(
                        "sequence %s was not moved to node %s within %s s",
                        sequence_id,
                        target.name,
                        self._timeout_s,
                    )
                    continue
            except MigrationInDoubtError as error:
                _logger.warning("sequence %s may be at node %s, or here: %s", sequence_id, target.name, error)
                return None
            except KVPoolError as error:
                _logger.info("sequence %s was not moved to node %s: %s", sequence_id, target.name, error)
                continue
            status = migration.get_status()
            [there] = [node for node in nodes if node.name == target.name]
            self.topology.note_transfer(
                find_nearness(migrator.location, there.location), status.num_bytes, status.elapsed_s
            )
            return target.name
        if not ranking.targets:
            _logger.info("sequence %s stays; no node accepts it: %s", sequence_id, ranking.describe())
        return None


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
