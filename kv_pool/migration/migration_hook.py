"""`MigrationHook`: sequences leave for other pools and nodes while a pool has too few free blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from kv_pool.core.arguments import as_count
from kv_pool.errors import KVPoolError, MigrationInDoubtError, OutOfThreadsError
from kv_pool.ids import NodeName, SequenceId
from kv_pool.loggers import get_logger
from kv_pool.migration.messages import NodeDescription, SequenceSubject
from kv_pool.migration.migrator import Migrator, NodeAnswer
from kv_pool.migration.topology import ExcludedNode, Ranking, Topology
from kv_pool.protocol import URGENT, BlockAllocationRequest
from kv_pool.reports.sequences import SequenceList

_logger = get_logger(__name__)


class MigratablePool(Protocol):
    """A pool whose sequences can migrate, such as `GPUKVPool` and `ControlledManager`."""

    def get_free_blocks(self) -> int:
        """Return how many blocks are free."""

    def describe_sequences(self) -> SequenceList:
        """Return a report on each sequence."""

    def list_victims(self, num_blocks: int) -> Sequence[Any]:
        """Return the sequences to evict for `num_blocks` more free blocks, in eviction order."""


@runtime_checkable
class ConnectedPool(MigratablePool, Protocol):
    """A pool that is connected to others of this process: a `GPUKVPool`."""

    migration_threshold: int

    def count_available(self, priority: int) -> int:
        """Return how many blocks a request of this priority can take."""

    def list_victims(
        self, num_blocks: int, priority: int = URGENT, sequence_id: SequenceId | None = None
    ) -> Sequence[Any]:
        """Return the sequences to evict for a request of this priority and sequence, in eviction order."""

    def count_free_elsewhere(self) -> dict[int, int]:
        """Return the number of free blocks of each connected pool, by device id."""

    def migrate_sequence(self, sequence_id: Any, target_device_id: int) -> object:
        """Move a sequence to a connected pool."""


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
        ask_timeout_s: time limit for the nodes to report their free blocks; they are asked at the same time.
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
        if not isinstance(pool, ConnectedPool):
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
        answers: list[NodeAnswer] | None = None
        sizes = {one.sequence_id: one.num_blocks for one in pool.describe_sequences().sequences}
        for sequence_id in victims:
            if pool.get_free_blocks() >= num_wanted:
                return num_moved
            num_blocks = sizes.get(sequence_id, 0)
            target: int | NodeName | None = self._move_to_pool(pool, sequence_id, num_blocks + num_spare)
            if target is None and self._migrator is not None:
                if answers is None:
                    answers = self._ask_nodes(self._migrator)
                target = self._move_to_node(self._migrator, sequence_id, num_blocks, num_spare, answers)
                if target is not None:
                    answers = None  # outdated: the target has fewer free blocks now
            if target is not None:
                num_moved += 1
                if self._on_migrated is not None:
                    self._on_migrated(sequence_id, target)
        if pool.get_free_blocks() < num_wanted:
            self._idle_until_s = self._clock() + self._retry_s
        return num_moved

    def _move_to_pool(self, pool: MigratablePool, sequence_id: Any, num_blocks: int) -> int | None:
        """Move a sequence to a connected pool with `num_blocks` free; return the device id or None."""
        if not isinstance(pool, ConnectedPool):
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

    def _ask_nodes(self, migrator: Migrator) -> list[NodeAnswer]:
        names = migrator.list_node_names() if self._nodes is None else self._nodes
        try:
            return migrator.ask_all([name for name in names if name != migrator.name], self._ask_timeout_s)
        except OutOfThreadsError as error:
            _logger.info("no node is asked to take sequences: %s", error)
            return []

    def _move_to_node(
        self,
        migrator: Migrator,
        sequence_id: Any,
        num_blocks: int,
        num_spare: int,
        answers: Sequence[NodeAnswer],
    ) -> NodeName | None:
        """Move a sequence to the first node that accepts it; return the node's name or None."""
        ranking = rank_nodes(self.topology, migrator, num_blocks, num_blocks + num_spare, answers)
        self.last_ranking = ranking
        for target in ranking.targets:
            log = logging.LoggerAdapter(_logger, {"sequence": sequence_id, "node": target.name})
            try:
                migration = migrator.migrate(SequenceSubject(sequence_id), target.name)
                try:
                    migration.wait(self._timeout_s)
                except TimeoutError:
                    if migration.cancel():
                        log.warning(
                            "sequence %s was not moved to node %s within %s s",
                            sequence_id,
                            target.name,
                            self._timeout_s,
                        )
                        continue
                    migration.wait(self._timeout_s)  # too late to cancel: it is about to end
            except (MigrationInDoubtError, TimeoutError) as error:
                log.warning("sequence %s may be at node %s, or here: %s", sequence_id, target.name, error)
                return None
            except KVPoolError as error:
                log.info("sequence %s was not moved to node %s: %s", sequence_id, target.name, error)
                continue
            status = migration.get_status()
            self.topology.note_transfer(target.nearness, status.num_bytes, status.elapsed_s)
            return target.name
        if not ranking.targets:
            _logger.info("sequence %s stays; no node accepts it: %s", sequence_id, ranking.describe())
        return None


def rank_nodes(
    topology: Topology, migrator: Migrator, num_blocks: int, num_wanted: int, answers: Sequence[NodeAnswer]
) -> Ranking:
    """Rank the nodes that can receive a sequence of `num_blocks` blocks, cheapest first.

    Args:
        migrator: of the source.
        num_wanted: blocks that must be free at the target.
        answers: of `migrator.ask_all`; nodes that did not answer are excluded, with their errors.
    """
    site = migrator.site
    ranking = topology.rank(
        migrator.location,
        num_blocks * site.layout.block_bytes,
        num_wanted,
        [one.there for one in answers if isinstance(one.there, NodeDescription)],
        layout=site.layout,
        sequence_kind=site.sequences.kind,
    )
    ranking.excluded.extend(
        ExcludedNode(one.name, one.there) for one in answers if isinstance(one.there, KVPoolError)
    )
    return ranking
