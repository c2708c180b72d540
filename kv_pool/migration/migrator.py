"""`Migrator`: a node that copies and moves blocks to and from other nodes."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kv_pool.closing import Running
from kv_pool.errors import (
    InvalidArgumentError,
    KVPoolError,
    MigrationError,
    OutOfThreadsError,
    StaleTransferError,
)
from kv_pool.ids import NodeName, TransferId
from kv_pool.loggers import get_logger
from kv_pool.migration import invariants, messages
from kv_pool.migration.bulk_listener import BulkListener
from kv_pool.migration.messages import MigrationStatus, PrefixSubject, Subject
from kv_pool.migration.migration import Migration
from kv_pool.migration.migration_book import Housekeeping, MigrationBook
from kv_pool.migration.outgoing import Push
from kv_pool.migration.peers import PeerLinks, Peers, check_name
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.source import SourceTransfers, make_incarnation
from kv_pool.migration.target import Pull
from kv_pool.migration.transfer_backend import BulkBackend, TransferBackend
from kv_pool.migration.verified_reads import PullSettings, RateLimit
from kv_pool.threads import Workers

if TYPE_CHECKING:
    from kv_pool.migration.remote_calls import CallServer

_logger = get_logger(__name__)

_MAX_CALL_S = 5.0
_MAX_ASKED_AT_ONCE = 16


class NodeAnswer(NamedTuple):
    """The description of a node, or why it did not answer, and the seconds that this took."""

    name: NodeName
    there: messages.NodeDescription | KVPoolError
    seconds: float


class Migrator(Running):
    """A node: it copies and moves blocks between its site and the sites of other nodes.

        with Migrator("a", site, backends=[InProcessBackend(storage)]) as a, \\
             Migrator("b", other_site, backends=[InProcessBackend(other_storage)]) as b:
            a.connect(b)
            a.migrate(SequenceSubject("request 7"), "b").wait()

    Args:
        name: unique among the nodes: 1 to 64 letters, digits, `.`, `_`, `-`.
        backends: the transfer backends, most preferred first. Each uses the site's storage and belongs to
            this node only.
        secret: shared by the nodes, see `load_secret`; required to listen and to reach other processes.
        listen: host:port; None to be reachable within this process only. Needs pyzmq.
        bulk_port: port of the same host over which backends such as `TcpBackend` send blocks; 0 selects a
            free one, which readers are told.
        peers: addresses of other nodes.
        location: of this node, for the choice of targets.
        lease_s: duration of a lease that is not renewed. A node that is suspended for longer loses its
            running migrations.
        max_bytes_per_s: limit of all reads of this node; 0 for no limit.
        max_concurrent: limit of incoming migrations that run at the same time; others wait.
        on_phase: called with a status at each change, synchronously by the thread that made the change. It
            must not wait for a migration.
        is_registry: whether other nodes can announce themselves here.
        clock: monotonic time in seconds, the clock of the site's leases.

    `fetch` and `migrate` return immediately; threads do the work. Do not wait for a migration while holding
    the site's lock. A node can be started only once.

    Attributes:
        incarnation: identifies this start of the node.
    """

    def __init__(
        self,
        name: NodeName,
        site: PoolSite,
        *,
        backends: Sequence[TransferBackend],
        secret: bytes | None = None,
        listen: str | None = None,
        bulk_port: int = 0,
        peers: Peers | None = None,
        location: messages.NodeLocation = messages.NodeLocation(),  # noqa: B008 (frozen)
        lease_s: float = 30.0,
        max_bytes_per_s: float = 0.0,
        max_concurrent: int = 4,
        on_phase: Callable[[MigrationStatus], object] | None = None,
        is_registry: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not lease_s > 0 or max_concurrent < 1:
            raise InvalidArgumentError(
                f"lease_s is {lease_s} and max_concurrent is {max_concurrent}; lease_s must be greater than "
                "0, and max_concurrent at least 1"
            )
        if listen is not None and secret is None:
            raise InvalidArgumentError(f"node {name!r} needs a secret to listen at {listen}; see load_secret")
        self.name: Final = check_name(name)
        self.incarnation: Final = make_incarnation(name, secrets.token_hex(8))
        self.site: Final = site
        self.peers: Final = Peers(clock) if peers is None else peers
        self.location: Final = location
        self.lease_s: Final = lease_s
        self._backends = list(backends)
        self._is_registry = is_registry
        self._links = PeerLinks(name, self.peers, secret, backends)
        self._book = MigrationBook(name, on_phase)
        self._source = SourceTransfers(
            site,
            name,
            self.incarnation,
            lease_s,
            clock,
            lambda transfer: self._book.note_transfer(transfer, self._source),
        )
        self._pullers = Workers(f"kv_pool {name} pulls", max_concurrent)
        self._pushers = Workers(f"kv_pool {name} pushes", 64)
        self._settings = PullSettings(
            name,
            site,
            self._links,
            lease_s,
            min(_MAX_CALL_S, lease_s),
            clock,
            RateLimit(max_bytes_per_s, clock),
            Workers(f"kv_pool {name} asks", 4 + 2 * max_concurrent),
            self._book.note,
            [],
        )
        self._housekeeping = Housekeeping(self._settings, self._source, self._book)
        self._server: CallServer | None = None
        for backend in backends:
            backend.attach(self._source.check_leased, self._links.connect_bulk)
        if listen is not None and secret is not None:
            from kv_pool.migration.remote_calls import CallServer

            senders = {one.name: one.make_sender for one in backends if isinstance(one, BulkBackend)}
            bulk = BulkListener(senders, bulk_port)
            on_gone = self._source.expire_target
            self._server = CallServer(listen, secret, self.answer, bulk=bulk, on_gone=on_gone)
        self._is_running = False
        self._is_stopped = False

    # ---- the node --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start serving other nodes and expiring leases.

        Raises:
            EndpointError: the address cannot be used.
            OutOfThreadsError: the system cannot start a thread.
            InvalidArgumentError: the node was already started.
            In all cases nothing has changed.
        """
        if self._is_running or self._is_stopped:
            raise InvalidArgumentError(f"node {self.name!r} was already started; create a new one")
        if self._server is not None:
            self._server.start()
        try:
            self._housekeeping.start()
        except OutOfThreadsError:
            if self._server is not None:
                self._server.stop()
            raise
        self._is_running = True

    def stop(self) -> None:
        """Stop the node: cancel running migrations, end leases and holds, and close the connections.

        A move in doubt is retried for one more lease. If its source still does not answer, its blocks stay in
        the pool as cached copies, and the sequence is not taken over. Blocks that a broken transfer may still
        write to stay in quarantine.
        """
        if not self._is_running:
            return
        self._is_running, self._is_stopped = False, True
        running = self._book.list_running()
        for migration in running:
            migration.cancel()
        deadline = time.monotonic() + self.lease_s + self._settings.call_s
        for migration in running:
            migration.wait_for_end(max(0.0, deadline - time.monotonic()))
        self._housekeeping.stop()
        if self._server is not None:
            self._server.stop()
        for migration in running:
            if isinstance(migration, Pull) and migration.abandon_doubt():
                _logger.warning("node %s stops with a move in doubt: %s", self.name, migration.error)
        for transfer in self._source.list_prepared():
            self._source.cancel(messages.CancelTransfer(transfer.message.transfer_id, "the source stops"))
        for workers in (self._pullers, self._pushers, self._settings.askers):
            workers.stop()
        for pull in self._book.list_pulls():
            pull.release()
        self._links.close()
        for backend in self._backends:
            backend.close()
        self._housekeeping.settle()

    @property
    def address(self) -> str:
        """The listening address, host:port; "" if the node does not listen."""
        return "" if self._server is None else self._server.address

    def connect(self, peer: Migrator) -> None:
        """Connect this node and another node of this process, in both directions, by their names.

        Raises:
            InvalidArgumentError: both have the same name. Nothing has changed.
        """
        if peer.name == self.name:
            raise InvalidArgumentError(f"both nodes are named {self.name!r}; names must be unique")
        self._links.connect(peer.name, peer.answer)
        peer._links.connect(self.name, self.answer)

    def list_node_names(self) -> list[NodeName]:
        """Return the names of the known nodes: those connected in this process, then the peers."""
        names = [*self._links.list_local(), *(node.name for node in self.peers.list_nodes())]
        return [name for name in dict.fromkeys(names) if name != self.name]

    def describe(self) -> messages.NodeDescription:
        """Return the description of this node, its pool and its backends."""
        with self.site.lock:
            num_free = self.site.count_free_blocks()
        return messages.NodeDescription(
            self.name,
            self.incarnation,
            self.site.layout,
            num_free,
            self.site.storage.num_blocks - 1,
            {backend.name: backend.describe() for backend in self._backends},
            self.location,
            self.address,
            self.site.sequences.kind,
        )

    def make_announcement(self, ttl_s: float) -> messages.AnnounceNode:
        """Return the announcement of this node to a registry; see `Announcer`."""
        return messages.AnnounceNode(self.name, self.incarnation, self.address, self.location, ttl_s)

    def ask(self, name: NodeName, timeout_s: float = 5.0) -> messages.NodeDescription:
        """Return the description of another node.

        Raises:
            PeerUnavailableError: the name is unknown, or the node does not answer.
            PeerAuthenticationError: the node has another secret.
        """
        reply = self._links.call(name, messages.DescribeNode(), timeout_s)
        return messages.as_reply(reply, messages.NodeDescription, f"node {name!r}")

    def ask_all(self, names: Sequence[NodeName], timeout_s: float = 5.0) -> list[NodeAnswer]:
        """Ask other nodes for their descriptions at the same time. Return their answers in this order.

        Raises:
            OutOfThreadsError: the system cannot start a thread for the requests. Nothing has changed.
        """

        def ask(name: NodeName) -> NodeAnswer:
            started = self._settings.clock()
            there: messages.NodeDescription | KVPoolError
            try:
                there = self.ask(name, timeout_s)
            except KVPoolError as error:
                there = error
            return NodeAnswer(name, there, self._settings.clock() - started)

        workers = Workers("kv_pool peers", _MAX_ASKED_AT_ONCE)
        try:
            asked = [workers.submit(partial(ask, name)) for name in names]
            return [one.result() for one in asked]
        finally:
            workers.stop()

    # ---- migrations ------------------------------------------------------------------------------

    def fetch(
        self,
        subject: Subject,
        source: NodeName,
        *,
        is_move: bool = False,
        max_bytes_per_s: float | None = None,
        hold_s: float = 0.0,
        backend: str = "",
    ) -> Migration:
        """Start to copy or move a subject from another node to this one.

        Args:
            source: the source node's name.
            is_move: the source releases the subject. Not possible for a prefix.
            max_bytes_per_s: limit of this migration; None for the node's limit only.
            hold_s: seconds for which the arrived blocks count as in use and so cannot be evicted: time to
                admit a request that starts with them. `Migration.release` and `stop` end the hold earlier.
            backend: the only backend to read with; "" for the source's first that works.
        Raises:
            InvalidArgumentError: a limit or time is negative, a prefix is to be moved, or the other node is
                this one.
            MigrationError: this node is not running.
            `Migration.wait` raises all other errors.
        """
        if not 0 <= hold_s < math.inf:
            raise InvalidArgumentError(f"hold_s is {hold_s}; pass a finite number of seconds, 0 for no hold")
        transfer_id, limit = TransferId(secrets.token_bytes(16)), max_bytes_per_s or 0.0
        wanted = messages.PullSubject(
            transfer_id, subject, is_move, source, max_bytes_per_s=limit, backend=backend
        )
        return self._start_pull(wanted, hold_s)

    def migrate(
        self,
        subject: Subject,
        target: NodeName,
        *,
        is_move: bool = True,
        max_bytes_per_s: float | None = None,
        backend: str = "",
    ) -> Migration:
        """Start to move or copy a subject to another node, by asking that node to fetch it.

        The migration has the same id at both nodes. Raises the errors of `fetch`.
        """
        self._check_can_start(subject, target, is_move)
        limit = max_bytes_per_s or 0.0
        RateLimit(limit, self._settings.clock)
        transfer_id = TransferId(secrets.token_bytes(16))
        wanted = messages.PullSubject(transfer_id, subject, is_move, self.name, self.address, limit, backend)
        return self._start_migration(Push(self._settings, wanted, target, self._source), self._pushers)

    def list_migrations(self) -> list[MigrationStatus]:
        """Return the running migrations and the last 1000 that ended, in both directions, oldest first.

        Fetches whose arrived blocks are held (`hold_s`) are listed in addition, however long ago they ended.
        """
        return [migration.get_status() for migration in self._book.list_all()]

    def count_migrations(self) -> dict[str, int]:
        """Return the number of migrations by phase: those that run now, and those that have ended so far."""
        return self._book.count()

    def find_migration(self, migration_id: str) -> Migration:
        """Return one of the migrations that `list_migrations` lists.

        Raises:
            InvalidArgumentError: the id is unknown; the message lists the running migrations.
        """
        return self._book.find(migration_id)

    def check_is_other(self, name: NodeName) -> None:
        """Raise InvalidArgumentError, which lists the other nodes, if this is the node's own name."""
        if name == self.name:
            others = ", ".join(self.list_node_names()) or "none; add one to its peers"
            raise InvalidArgumentError(
                f"node {name!r} cannot migrate to itself; name another node. It knows: {others}"
            )

    def check_invariants(self) -> None:
        """Verify the invariants of `migration/invariants.py`. Raises CorruptedPoolError; changes nothing."""
        with self.site.lock:
            pulls = self._book.list_pulls()  # with the lock: one that starts meanwhile has a reservation
            unsettled = [hold for hold, _ in self._settings.unsettled]
            invariants.check(self.site, self._source, pulls, unsettled)

    # ---- calls of other nodes --------------------------------------------------------------------

    def answer(self, message: messages.Message, caller: NodeName) -> messages.Message:
        """Return the reply to a message, or raise the error to send back. Thread-safe.

        Args:
            caller: the name that the calling node gave.
        """
        match message:
            case messages.DescribeNode():
                return self.describe()
            case messages.PrepareTransfer():
                return self._source.prepare(message)
            case messages.AskChecksums():
                return self._source.compute_checksums(message)
            case messages.RenewLease():
                return self._source.renew(message)
            case messages.AcknowledgeTransfer():
                return self._source.acknowledge(message)
            case messages.CancelTransfer():
                return self._source.cancel(message)
            case messages.PullSubject():
                return self._answer_pull(message)
            case messages.AskPull():
                return self._answer_ask_pull(message)
            case messages.AnnounceNode() if self._is_registry:
                return self.peers.announce(
                    message, messages.KnownNode(self.name, self.address, self.location)
                )
        raise InvalidArgumentError(
            f"node {self.name!r} does not answer {type(message).__name__} from {caller!r}"
        )

    def _answer_pull(self, message: messages.PullSubject) -> messages.Acknowledged:
        self._links.learn_address(message.source, message.source_address)
        if self._book.get(message.transfer_id) is None:
            self._start_pull(message)
        return messages.Acknowledged()

    def _answer_ask_pull(self, message: messages.AskPull) -> messages.PullOutcome:
        migration = self._book.get(message.transfer_id)
        if not isinstance(migration, Pull):
            raise StaleTransferError(f"node {self.name!r} has no pull {message.transfer_id.hex()}")
        if message.cancel:
            migration.cancel()
        return messages.PullOutcome(migration.get_status(), migration.new_ids)

    # ---- inside ----------------------------------------------------------------------------------

    def _check_can_start(self, subject: Subject, peer: NodeName, is_move: bool) -> None:
        if not self._is_running:
            raise MigrationError(f"node {self.name!r} is not running; call start()")
        self.check_is_other(peer)
        if is_move and isinstance(subject, PrefixSubject):
            raise InvalidArgumentError("a prefix cannot be moved, only copied: pass is_move=False")

    def _start_pull(self, wanted: messages.PullSubject, hold_s: float = 0.0) -> Migration:
        self._check_can_start(wanted.subject, wanted.source, wanted.is_move)
        return self._start_migration(Pull(self._settings, wanted, hold_s), self._pullers)

    def _start_migration(self, migration: Pull | Push, workers: Workers) -> Migration:
        """Run a migration on a worker and return it, or the one that already has its id."""
        known = self._book.add(migration)
        if known is not migration:
            return known
        self._book.note(migration)
        try:
            workers.submit(migration.run)
        except OutOfThreadsError:
            self._book.remove(migration)
            raise
        return migration
