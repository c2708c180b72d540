"""`OffloadHook`: sequences of a pool that runs full move to pools and nodes with room."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.core.arguments import as_int
from kv_pool.errors import KVPoolError, MigrationInDoubtError, PeerUnavailableError
from kv_pool.migration.messages import NodeDescription
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.subjects import SequenceSubject
from kv_pool.migration.topology import Ranking, Topology, find_nearness
from kv_pool.protocol import BlockAllocationRequest
from kv_pool.reports.sequences import SequenceList

_logger = logging.getLogger(__name__)


class OffloadablePool(Protocol):
    """A pool whose sequences can move away, such as `GPUKVPool` and `ControlledManager`."""

    def get_free_blocks(self) -> int:
        """Return how many blocks are free."""

    def describe_sequences(self) -> SequenceList:
        """Return a report of each sequence."""

    def list_victims(self, num_blocks: int) -> Sequence[Any]:
        """Return the sequences that go first for `num_blocks` more, the first to go first."""


class OffloadHook:
    """A `migration_hook` for `GPUKVPool`: moves sequences away while too few blocks are free.

        hook = OffloadHook(topology)
        pool = GPUKVPool(..., migration_hook=hook, offload_threshold=64)
        hook.use(pool, migrator)

    Sequences go before a request would leave fewer than `offload_threshold` blocks free; so they move instead
    of being evicted. Without a threshold a pool evicts first, and with `eviction_policy=None` the hook is
    called for what would be refused. Engines that hold the pool's lock during a step call `keep_free` between
    two steps instead.

    Which sequences go is ranked by the pool's eviction policy, by last use where it has none. `on_evicted`
    is not called for them, since they go on elsewhere. Targets are, in this order: the pools that `connect`
    knows, the one with most free blocks first (the bytes are copied in memory, without sockets); nodes, the
    cheapest by the topology first. A threshold is kept at the target, too, so that two full pools do not
    offload to each other; a request that finds too few blocks free uses all that the target has.

    Args:
        nodes: names of the nodes that may be asked; None for all that the migrator knows, in this process
            and elsewhere.
        timeout_s: how long one sequence may take; when it is over the migration is cancelled.
        ask_timeout_s: how long a node may take to say how much room it has.
        retry_s: for how long the hook does nothing after it could not reach a threshold. A request that finds
            too few blocks free is not affected.
        on_offloaded: called with a sequence's id and the device id or the node's name that has it now, by the
            thread that made the call; the pool is not locked. A `SequenceOwner` is notified, too.
        clock: seconds.

    Attributes:
        last_ranking: the nodes that could have taken the last sequence, and why, cheapest first; None before
            there was one.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        *,
        nodes: Sequence[str] | None = None,
        timeout_s: float = 30.0,
        ask_timeout_s: float = 2.0,
        retry_s: float = 1.0,
        on_offloaded: Callable[[Any, int | str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topology = Topology() if topology is None else topology
        self.last_ranking: Ranking | None = None
        self._nodes = None if nodes is None else list(nodes)
        self._timeout_s = timeout_s
        self._ask_timeout_s = ask_timeout_s
        self._retry_s = retry_s
        self._on_offloaded = on_offloaded
        self._clock = clock
        self._idle_until_s = float("-inf")
        self._pool: OffloadablePool | None = None
        self._migrator: Migrator | None = None

    def use(self, pool: OffloadablePool, migrator: Migrator | None = None) -> None:
        """Work for this pool, through its migrator; None: to connected pools only.

        Until then the hook does nothing.
        """
        self._pool, self._migrator = pool, migrator

    def __call__(self, request: BlockAllocationRequest, num_missing: int) -> None:
        """Move sequences away until `num_missing` more blocks are free, or no sequence finds a place.

        Waits for the transfers: the caller must not hold the pool's lock. Raises nothing of ours; what could
        not be moved is logged, and stays.
        """
        pool = self._pool
        if not isinstance(pool, GPUKVPool):
            return
        is_urgent = pool.count_available(request.priority) < request.num_blocks
        num_spare = 0 if is_urgent else pool.offload_threshold
        if is_urgent or self._clock() >= self._idle_until_s:
            victims = pool.list_victims(num_missing, request.priority, request.sequence_id)
            self._move_away(pool, victims, num_missing, num_spare)

    def keep_free(self, num_blocks: int) -> int:
        """Move sequences away if fewer than `num_blocks` blocks are free. As the call of the hook otherwise.

        Returns:
            How many have moved; 0 for `retry_s` after a call that did not reach `num_blocks`.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        if self._pool is None or self._clock() < self._idle_until_s:
            return 0
        num_missing = num_blocks - self._pool.get_free_blocks()
        if num_missing <= 0:
            return 0
        return self._move_away(self._pool, self._pool.list_victims(num_missing), num_missing, num_blocks)

    def _move_away(
        self, pool: OffloadablePool, victims: Sequence[Any], num_missing: int, num_spare: int
    ) -> int:
        """Move sequences away until `num_missing` more blocks are free; return how many have moved.

        Args:
            num_spare: blocks that have to be free at a target afterwards.
        """
        num_wanted = pool.get_free_blocks() + num_missing
        num_moved = 0
        nodes: list[NodeDescription] | None = None
        sizes = {one.sequence_id: one.num_blocks for one in pool.describe_sequences().sequences}
        for sequence_id in victims:
            if pool.get_free_blocks() >= num_wanted:
                return num_moved
            num_blocks = sizes.get(sequence_id, 0)
            target: int | str | None = self._move_to_pool(pool, sequence_id, num_blocks + num_spare)
            if target is None and self._migrator is not None:
                if nodes is None:
                    nodes = self._ask_nodes(self._migrator)
                target = self._move_to_node(self._migrator, sequence_id, num_blocks, num_spare, nodes)
                if target is not None:
                    nodes = None  # it has less room now
            if target is not None:
                num_moved += 1
                if self._on_offloaded is not None:
                    self._on_offloaded(sequence_id, target)
        if pool.get_free_blocks() < num_wanted:
            self._idle_until_s = self._clock() + self._retry_s
        return num_moved

    def _move_to_pool(self, pool: OffloadablePool, sequence_id: Any, num_blocks: int) -> int | None:
        """Move a sequence to a connected pool with `num_blocks` free; return its device id, None for none."""
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
                _logger.info("node %s can not take sequences: %s", name, error)
        return found

    def _move_to_node(
        self,
        migrator: Migrator,
        sequence_id: Any,
        num_blocks: int,
        num_spare: int,
        nodes: Sequence[NodeDescription],
    ) -> str | None:
        """Move a sequence to the first node that takes it; return the node's name, None for none."""
        ranking = self.topology.rank(
            migrator.location,
            num_blocks * migrator.site.storage.block_bytes,
            num_blocks + num_spare,
            nodes,
            layout=migrator.site.layout,
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
            _logger.info("sequence %s stays, no node takes it: %s", sequence_id, ranking.describe())
        return None
