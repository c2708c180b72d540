"""`LiveNode`: a pool that other nodes can reach, its secret, and the commands that it carries out."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.control.controlled_manager import ControlledManager
from kv_pool.control.messages import MigrationList, PeerList, PeerReport
from kv_pool.control.serve_settings import ServeSettings
from kv_pool.control.socket_path import get_default_folder, lock_socket, make_folder
from kv_pool.errors import InvalidArgumentError, KVPoolError, PoolExhaustedError, UnknownSequenceError
from kv_pool.ids import NodeName, RequestId, SequenceId
from kv_pool.loggers import get_logger
from kv_pool.migration.announcer import Announcer
from kv_pool.migration.backends.tcp import TcpBackend
from kv_pool.migration.machine import name_device, read_machine
from kv_pool.migration.messages import (
    MigrationPhase,
    MigrationStatus,
    NodeDescription,
    NodeLocation,
    SequenceSubject,
)
from kv_pool.migration.migration_hook import MigrationHook, rank_nodes
from kv_pool.migration.migrator import Migrator, NodeAnswer
from kv_pool.migration.peers import Peers, parse_peer
from kv_pool.migration.pool_sequences import PoolSequences
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.secret import load_secret, write_secret_file
from kv_pool.migration.sequences import SequenceOwner, Sequences
from kv_pool.migration.topology import Topology, find_nearness, read_peers, read_topology
from kv_pool.migration.transfer_backend import TransferBackend
from kv_pool.quantities import parse_rate
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.threads import start_thread

_DEFAULT_LISTEN = "127.0.0.1:0"
_ASK_TIMEOUT_S = 2.0
_LOCK_TIMEOUT_S = 10.0
_SECONDS_BETWEEN_CHECKS = 0.1
_SHOWN_IDS = 10

_logger = get_logger(__name__)


def _make_backend(name: str, storage: BlockStorage) -> TransferBackend:
    if name == "nixl":
        from kv_pool.migration.backends.nixl import NixlBackend

        return NixlBackend(storage)
    if name == "tcp":
        return TcpBackend(storage)
    raise InvalidArgumentError(f"unknown backend {name!r}; known are tcp and nixl")


class LiveNode:
    """A pool or a manager as a node: its migrator, the nodes that it knows, and their distances.

        with LiveNode(pool, ServeSettings(name="a")) as node:
            node.migrate(7, "b")

    Args:
        settings: the name of the node, which is required, and the options about nodes.
        owner: the engine that owns the sequences, if any; see `SequenceOwner`.

    Attributes:
        migrator, topology, migration_hook: the parts of the node. With a `migration_threshold`, a thread
            calls `keep_free` of the hook.
    Raises:
        InvalidArgumentError: the settings are invalid, or there is no secret.
    """

    def __init__(
        self,
        pool: GPUKVPool | ControlledManager,
        settings: ServeSettings,
        *,
        owner: SequenceOwner[Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if settings.name is None:
            raise InvalidArgumentError("a node needs a name; pass --name")
        name = NodeName(settings.name)
        self.pool = pool
        self.topology = Topology() if settings.nodes is None else read_topology(settings.nodes)
        peers = Peers(clock) if settings.nodes is None else read_peers(settings.nodes, clock)
        for text in settings.peer or ():
            known = parse_peer(text)
            peers.add(known.name, known.address)
        secret = load_or_create_secret(settings.secret_file)
        sequences: Sequences = PoolSequences(pool) if isinstance(pool, GPUKVPool) else pool.get_sequences()
        site = PoolSite(sequences, owner=owner)
        self._locations: dict[NodeName, NodeLocation] = {}
        self.migrator = Migrator(
            name,
            site,
            backends=[_make_backend(kind, site.storage) for kind in settings.backend or ["tcp"]],
            secret=secret,
            listen=settings.listen or _DEFAULT_LISTEN,
            bulk_port=settings.bulk_port,
            peers=peers,
            location=NodeLocation(
                settings.network,
                settings.rack,
                settings.host or socket.gethostname(),
                settings.device or name_device(site.storage.device, read_machine()),
            ),
            max_bytes_per_s=0.0 if settings.max_rate is None else parse_rate(settings.max_rate),
            on_phase=self._learn_from,
            is_registry=True,
        )
        self._announcer: Announcer | None = None
        if settings.registry is not None:
            from kv_pool.migration.remote_calls import RemoteCalls

            is_address = ":" in settings.registry
            address = settings.registry if is_address else peers.get_address(NodeName(settings.registry))
            self._announcer = Announcer(
                self.migrator.make_announcement, peers, RemoteCalls(address, secret, name)
            )
        self._migration_threshold = settings.migration_threshold
        self.migration_hook = MigrationHook(self.topology, ask_timeout_s=_ASK_TIMEOUT_S)
        self.migration_hook.use(pool, self.migrator)
        self._stopping = threading.Event()
        self._migrating: threading.Thread | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "LiveNode":
        with ExitStack() as stack:
            # Runs last: the migrator cancels the migrations that the thread waits for.
            stack.callback(self._join)
            node = stack.enter_context(self.migrator)
            if self._announcer is not None:
                stack.enter_context(self._announcer)
            if self._migration_threshold:
                self._migrating = start_thread(f"kv_pool {node.name} migrates", self._migrate_excess)
                stack.callback(self._stopping.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def migrate(
        self,
        sequence_id: SequenceId | RequestId | None,
        target: NodeName | None,
        *,
        is_move: bool = True,
        max_bytes_per_s: float = 0.0,
        backend: str = "",
    ) -> MigrationStatus:
        """Start to migrate a sequence, after asking the target whether enough blocks are free.

        Args:
            sequence_id: None for the newest: the highest sequence id, or the request that was admitted last.
            target: name of the target node. None for the cheapest node, by the topology, with enough free
                blocks, the same kind of pool and the same layout of blocks.
            backend: name of the backend with which the target reads the bytes; "" for the source's first.
        Raises:
            UnknownSequenceError: the sequence has no blocks; the message names some that have.
            PoolExhaustedError: the target, or each known node, has too few free blocks or cannot take the
                sequence; the message says why.
            InvalidArgumentError: the target is this node, this node does not offer the backend, or the
                target's pool is of another kind (`GPUKVPool` or `KVCacheManager`).
            PeerUnavailableError, PeerAuthenticationError, LayoutMismatchError: the target cannot take it.
            In all cases nothing has changed.
        Blocks until the target has answered.
        """
        if target is not None:
            self.migrator.check_is_other(target)
        held = {one.sequence_id: one.num_blocks for one in self.pool.describe_sequences().sequences}
        ids = list(held)
        if sequence_id is None:
            if not ids:
                raise UnknownSequenceError(f"no sequence has blocks on node {self.migrator.name}")
            sequence_id = max((one for one in ids if isinstance(one, int)), default=ids[-1])
        sequence_id = self.migrator.site.sequences.as_id(sequence_id)
        num_blocks = held.get(sequence_id, 0)
        if not num_blocks:
            more = f" and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else ""
            raise UnknownSequenceError(
                f"sequence {sequence_id} has no blocks on node {self.migrator.name}; these have: "
                f"{', '.join(map(str, ids[-_SHOWN_IDS:])) or 'none'}{more}"
            )
        offered = self.migrator.describe().backends
        if backend and backend not in offered:
            raise InvalidArgumentError(
                f"node {self.migrator.name} has no backend {backend!r}; it offers {', '.join(offered)}"
            )
        answers = self._ask(self.migrator.list_node_names() if target is None else [target])
        ranking = rank_nodes(self.topology, self.migrator, num_blocks, num_blocks, answers)
        if not ranking.targets and target is not None:
            [refusing] = ranking.excluded
            raise type(refusing.error)(f"node {target} cannot take sequence {sequence_id}: {refusing.reason}")
        if not ranking.targets:
            why = "; ".join(ranking.describe().splitlines())
            raise PoolExhaustedError(f"no node can take sequence {sequence_id}: {why}")
        migration = self.migrator.migrate(
            SequenceSubject(sequence_id),
            ranking.targets[0].name,
            is_move=is_move,
            max_bytes_per_s=max_bytes_per_s or None,
            backend=backend,
        )
        return migration.get_status()

    def list_migrations(self, migration_id: str | None = None) -> MigrationList:
        """Return all known migrations, or one. Raises InvalidArgumentError if the id is unknown."""
        if migration_id is None:
            return MigrationList(self.migrator.name, self.migrator.list_migrations())
        return MigrationList(self.migrator.name, [self.migrator.find_migration(migration_id).get_status()])

    def cancel(self, migration_id: str) -> MigrationStatus:
        """Cancel a migration, unless it is too late. Raises InvalidArgumentError if the id is unknown."""
        migration = self.migrator.find_migration(migration_id)
        migration.cancel()
        return migration.get_status()

    def list_peers(self) -> PeerList:
        """Ask all known nodes at the same time and return their reports. Takes up to 2 s.

        Raises:
            OutOfThreadsError: the system cannot start a thread for the requests. Nothing has changed.
        """
        addresses = {node.name: node.address for node in self.migrator.peers.list_nodes()}
        reports = []
        for name, there, round_trip_s in self._ask(self.migrator.list_node_names()):
            address = addresses.get(name, "")
            if isinstance(there, KVPoolError):
                reports.append(PeerReport(name, address, error=str(there)))
                continue
            nearness = find_nearness(self.migrator.location, there.location).value
            free, blocks = there.num_free_blocks, there.num_blocks
            reports.append(PeerReport(name, address, nearness, free, blocks, round_trip_s * 1000))
        return PeerList(self.migrator.name, self.migrator.address, reports)

    def _join(self) -> None:
        if self._migrating is not None:
            self._migrating.join()

    def _migrate_excess(self) -> None:
        while not self._stopping.wait(_SECONDS_BETWEEN_CHECKS):
            self.migration_hook.keep_free(self._migration_threshold)

    def _ask(self, names: Sequence[NodeName]) -> list[NodeAnswer]:
        """Ask these nodes at the same time; learn their locations and round-trip times."""
        answers = self.migrator.ask_all(names, _ASK_TIMEOUT_S)
        for name, there, seconds in answers:
            if isinstance(there, NodeDescription):
                self._locations[name] = there.location
                nearness = find_nearness(self.migrator.location, there.location)
                self.topology.note_round_trip(nearness, seconds)
        return answers

    def _learn_from(self, status: MigrationStatus) -> None:
        """Pass the measured speed of a migration into this node to the topology; log a failed one."""
        if status.phase is MigrationPhase.DONE and status.direction == "in":
            there = self._locations.get(status.peer, NodeLocation())
            nearness = find_nearness(self.migrator.location, there)
            self.topology.note_transfer(nearness, status.num_bytes, status.elapsed_s)
        elif status.phase is MigrationPhase.FAILED:
            fields = {"migration": status.migration_id, "node": status.peer, "direction": status.direction}
            what = f"{status.subject} to or from node {status.peer}"
            _logger.info("%s: %s", what, status.error_message, extra=fields)


def load_or_create_secret(path: str | None) -> bytes:
    """Return the secret in a file; for None in the default file, which is created if it does not exist.

    The default is beside the control sockets, in a folder that only its owner can enter.
    Raises:
        InvalidArgumentError: the file does not exist, or other users can read it; see `load_secret`.
        ControlError: the folder of the default file belongs to another user, or the file cannot be locked.
    """
    if path is not None:
        return load_secret(path)
    default = get_default_folder() / "secret"
    make_folder(default)
    with lock_socket(default, _LOCK_TIMEOUT_S):  # two nodes that start together use one secret
        if not default.exists():
            draft = default.with_name("secret.new")
            draft.unlink(missing_ok=True)  # of a node that was killed
            write_secret_file(draft)
            draft.rename(default)
    return load_secret(default)
