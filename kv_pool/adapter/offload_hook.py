"""`OffloadHook`: a full pool's sequences go to the cheapest node with room instead of being evicted."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.errors import KVPoolError, MigrationInDoubtError, PeerUnavailableError
from kv_pool.migration.messages import NodeDescription
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.subjects import SequenceSubject
from kv_pool.migration.topology import Ranking, Topology, find_nearness
from kv_pool.protocol import BlockAllocationRequest

_logger = logging.getLogger(__name__)


class OffloadHook:
    """A `migration_hook` for `GPUKVPool`: moves sequences away until a refused request finds its blocks.

        hook = OffloadHook(topology)
        pool = GPUKVPool(..., migration_hook=hook)
        hook.use(pool, migrator)

    Which sequences go is ranked by the pool's eviction policy, by last use where it has none. `on_evicted`
    hears nothing of them, since they go on elsewhere. Where they go is the topology's: for each
    the cheapest node with room for it, then the next. A pool with an eviction policy of its own evicts before
    it asks the hook; leave the policy out where sequences should rather move than be lost.

    Args:
        nodes: names of the nodes that may be asked; None for all of the migrator's `peers`.
        timeout_s: how long one sequence may take; when it is over the migration is cancelled.
        ask_timeout_s: how long a node may take to say how much room it has.

    Attributes:
        last_ranking: who could have taken the last sequence, and why, cheapest first; None before there was
            one.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        *,
        nodes: Sequence[str] | None = None,
        timeout_s: float = 30.0,
        ask_timeout_s: float = 2.0,
    ) -> None:
        self.topology = Topology() if topology is None else topology
        self.last_ranking: Ranking | None = None
        self._nodes = None if nodes is None else list(nodes)
        self._timeout_s = timeout_s
        self._ask_timeout_s = ask_timeout_s
        self._pool: GPUKVPool | None = None
        self._migrator: Migrator | None = None

    def use(self, pool: GPUKVPool, migrator: Migrator) -> None:
        """Work for this pool, through its migrator. Until then the hook does nothing."""
        self._pool, self._migrator = pool, migrator

    def __call__(self, request: BlockAllocationRequest, num_missing: int) -> None:
        """Move sequences away until `num_missing` more blocks are free, or no node takes one.

        Waits for the transfers: the caller must not hold the pool's lock. Raises nothing of ours; what could
        not be moved is logged, and stays.
        """
        pool, migrator = self._pool, self._migrator
        if pool is None or migrator is None:
            return
        num_wanted = pool.get_free_blocks() + num_missing
        nodes: list[NodeDescription] | None = None
        for sequence_id in pool.list_victims(num_missing, request.priority, request.sequence_id):
            if pool.get_free_blocks() >= num_wanted:
                return
            if nodes is None:
                nodes = self._ask_nodes(migrator)
            if self._move(pool, migrator, sequence_id, nodes):
                nodes = None  # one of them has less room now

    def _ask_nodes(self, migrator: Migrator) -> list[NodeDescription]:
        names = [node.name for node in migrator.peers.list_nodes()] if self._nodes is None else self._nodes
        found = []
        for name in names:
            if name == migrator.name:
                continue
            try:
                found.append(migrator.ask(name, self._ask_timeout_s))
            except PeerUnavailableError as error:
                _logger.info("node %s can not take sequences: %s", name, error)
        return found

    def _move(
        self, pool: GPUKVPool, migrator: Migrator, sequence_id: int, nodes: Sequence[NodeDescription]
    ) -> bool:
        """Move a sequence to the first node that takes it."""
        num_blocks = len(pool.blocks_of(sequence_id))
        ranking = self.topology.rank(
            migrator.location, num_blocks * pool.block_bytes, num_blocks, nodes, layout=migrator.site.layout
        )
        self.last_ranking = ranking
        for target in ranking.targets:
            migration = migrator.migrate(SequenceSubject(sequence_id), target.name)
            try:
                migration.wait(self._timeout_s)
            except TimeoutError:
                if migration.cancel():
                    _logger.warning(
                        "sequence %d was not moved to node %s within %s s",
                        sequence_id,
                        target.name,
                        self._timeout_s,
                    )
                    continue
            except MigrationInDoubtError as error:
                _logger.warning("sequence %d may be at node %s, or here: %s", sequence_id, target.name, error)
                return False
            except KVPoolError as error:
                _logger.info("sequence %d was not moved to node %s: %s", sequence_id, target.name, error)
                continue
            status = migration.get_status()
            [there] = [node for node in nodes if node.name == target.name]
            self.topology.note_transfer(
                find_nearness(migrator.location, there.location), status.num_bytes, status.elapsed_s
            )
            return True
        if not ranking.targets:
            _logger.info("sequence %d stays, no node takes it: %s", sequence_id, ranking.describe())
        return False
