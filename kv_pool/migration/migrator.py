"""`Migrator`: one node: lends blocks of its site to others, and pulls theirs."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from kv_pool.errors import (
    InvalidArgumentError,
    MigrationError,
    OutOfThreadsError,
    StaleTransferError,
)
from kv_pool.migration import invariants
from kv_pool.migration.call_server import CallServer
from kv_pool.migration.housekeeping import Housekeeping
from kv_pool.migration.messages import (
    AcknowledgeTransfer,
    AnnounceNode,
    AskChecksums,
    AskPull,
    CancelTransfer,
    DescribeNode,
    ListNodes,
    Message,
    NodeDescription,
    NodeLocation,
    PrepareTransfer,
    PullOutcome,
    PullStarted,
    PullSubject,
    RenewLease,
)
from kv_pool.migration.migration import IncomingMigration, Migration
from kv_pool.migration.migration_book import MigrationBook
from kv_pool.migration.peer_links import PeerLinks, PeerOfPull
from kv_pool.migration.peers import Peers, check_name
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.pull_settings import PullSettings
from kv_pool.migration.push import Push
from kv_pool.migration.rate_limit import RateLimit
from kv_pool.migration.registry import NodeRegistry
from kv_pool.migration.source import SourceTransfers, make_epoch
from kv_pool.migration.status import MigrationRecord, MigrationStatus
from kv_pool.migration.subjects import PrefixSubject, Subject
from kv_pool.migration.target import Pull
from kv_pool.migration.transfer_backend import TransferBackend
from kv_pool.migration.workers import Workers

_logger = logging.getLogger(__name__)

_MAX_CALL_S = 5.0


class Migrator:
    """A node: others copy and move blocks of its site, and it copies and moves theirs.

        with Migrator("a", site, backends=[InProcessBackend(storage)]) as a, \\
             Migrator("b", other_site, backends=[InProcessBackend(other_storage)]) as b:
            a.connect(b)
            a.migrate(SequenceSubject("request 7"), "b").wait()

    Args:
        name: of the node, which no other node has: 1 to 64 letters, digits, `.`, `_`, `-`.
        backends: ways to get at blocks, the preferred one first; each over the site's storage, and this
            node's alone.
        secret: shared by the nodes, see `load_secret`; needed to listen, and to reach nodes elsewhere.
        listen: host:port; None to be reached by nodes of this process only.
        peers: where other nodes listen.
        location: where this node is, for whoever chooses among nodes.
        lease_s: how long blocks are lent without a sign of life. A node that stops for longer loses the
            migrations it was in.
        max_bytes_per_s: that this node reads in all; 0 for no limit.
        max_concurrent: migrations to this node that are under way at a time; others wait.
        on_phase: called with a status at each change, by the thread that made it and before it goes on. Must
            not wait for a migration.
        registry: what this node answers about the nodes that are there; None to know its peers only.
        clock: the time in seconds, never falling; that of the site's leases.

    `fetch` and `migrate` return at once; the work is done by threads. Do not wait for a migration while
    holding the site's lock. A node is started once.

    Attributes:
        epoch: of this life of the node; a new one after each start.
    """

    def __init__(
        self,
        name: str,
        site: PoolSite,
        *,
        backends: Sequence[TransferBackend],
        secret: bytes | None = None,
        listen: str | None = None,
        peers: Peers | None = None,
        location: NodeLocation = NodeLocation(),  # noqa: B008 (frozen)
        lease_s: float = 30.0,
        max_bytes_per_s: float = 0.0,
        max_concurrent: int = 4,
        on_phase: Callable[[MigrationStatus], object] | None = None,
        registry: NodeRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not lease_s > 0 or max_concurrent < 1:
            raise InvalidArgumentError(
                f"lease_s is {lease_s} and max_concurrent {max_concurrent}; a lease lasts more than 0 s, and "
                "at least 1 migration is under way at a time"
            )
        if listen is not None and secret is None:
            raise InvalidArgumentError(
                f"node {name!r} listens at {listen}; only with a secret, see load_secret"
            )
        self.name: Final = check_name(name)
        self.epoch: Final = make_epoch(name, secrets.token_hex(8))
        self.site: Final = site
        self.peers: Final = Peers() if peers is None else peers
        self.location: Final = location
        self.lease_s: Final = lease_s
        self._backends = list(backends)
        self._registry = registry
        self._clock = clock
        self._call_s = min(_MAX_CALL_S, lease_s)
        self._links = PeerLinks(name, self.peers, secret, backends)
        self._book = MigrationBook(name, lease_s, on_phase)
        self._source = SourceTransfers(site, name, self.epoch, lease_s, clock, self._book.note_transfer)
        self._limit = RateLimit(max_bytes_per_s, clock)
        self._pullers = Workers(f"kv_pool {name} pulls", max_concurrent)
        self._askers = Workers(f"kv_pool {name} asks", 4 + 2 * max_concurrent)
        self._pushers = Workers(f"kv_pool {name} pushes", 64)
        self._housekeeping = Housekeeping(name, site, self._source, lease_s, clock, self._askers)
        self._book.attach(self._source, self._housekeeping)
        self._settings = PullSettings(
            name,
            site,
            lease_s,
            clock,
            time.monotonic,
            self._limit,
            self._askers,
            self._book.note_pull,
            self._housekeeping.note_unsettled,
        )
        self._server: CallServer | None = None
        for backend in backends:
            backend.attach(name, self._source.check_lent, self._links.find_address, secret or b"")
        if listen is not None and secret is not None:
            handlers = {backend.name: backend.get_bulk_handler() for backend in backends}
            self._server = CallServer(
                listen,
                secret,
                self.answer,
                bulk_handlers={key: handler for key, handler in handlers.items() if handler is not None},
            )
        self._is_running = False
        self._is_stopped = False

    # ---- the node --------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve others from now on, and end leases that are over.

        Raises:
            EndpointError: the address cannot be used.
            OutOfThreadsError: the system starts no thread.
            InvalidArgumentError: it was started before.
            In all cases nothing has changed.
        """
        if self._is_running or self._is_stopped:
            raise InvalidArgumentError(f"node {self.name!r} was started before; make a new one")
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
        """End: cancel what can be cancelled, take back what is lent, release what is held, hang up.

        A move whose source has not answered is asked about for another lease; without an answer its blocks
        stay in the pool as cached copies, and the sequence is not taken over. Blocks that a broken transfer
        may still write to stay in quarantine.
        """
        if not self._is_running:
            return
        self._is_running, self._is_stopped = False, True
        running = self._book.list_running()
        for migration in running:
            migration.cancel()
        deadline = time.monotonic() + self.lease_s + self._call_s
        for migration in running:
            migration.wait_for_end(max(0.0, deadline - time.monotonic()))
        self._housekeeping.stop()
        if self._server is not None:
            self._server.stop()
        for migration in running:
            if isinstance(migration, IncomingMigration) and migration.pull.give_up_doubt():
                _logger.warning("node %s stops, and a move is undecided: %s", self.name, migration.error)
        for transfer in self._source.list_lent():
            self._source.cancel(CancelTransfer(transfer.message.transfer_id, "the source stops"))
        for workers in (self._pullers, self._pushers, self._askers):
            workers.stop()
        self._book.release_held()
        self._links.close()
        for backend in self._backends:
            backend.close()
        self._housekeeping.settle()

    def __enter__(self) -> Migrator:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Where it listens, host:port; "" for nowhere."""
        return "" if self._server is None else self._server.address

    def connect(self, peer: Migrator) -> None:
        """Let this node and another one of this process reach each other by their names."""
        if peer.name == self.name:
            raise InvalidArgumentError(f"two nodes are called {self.name!r}")
        self._links.connect(peer.name, peer.answer)
        peer._links.connect(self.name, self.answer)

    def list_node_names(self) -> list[str]:
        """Return the names of the other nodes that this one knows: connected in this process, and peers."""
        names = [*self._links.list_local(), *(node.name for node in self.peers.list_nodes())]
        return [name for name in dict.fromkeys(names) if name != self.name]

    def describe(self) -> NodeDescription:
        """This node, its pool, and the ways to read from it."""
        with self.site.lock:
            num_free = self.site.count_free_blocks()
        return NodeDescription(
            self.name,
            self.epoch,
            self.site.layout,
            num_free,
            self.site.storage.num_blocks - 1,
            {backend.name: backend.describe() for backend in self._backends},
            self.location,
            self.address,
        )

    def ask(self, name: str, timeout_s: float = 5.0) -> NodeDescription:
        """What another node says of itself.

        Raises:
            PeerUnavailableError: it is not known, or does not answer; PeerAuthenticationError: not with our
                secret.
        """
        return self._links.describe(name, timeout_s)

    # ---- migrations ------------------------------------------------------------------------------

    def fetch(
        self,
        subject: Subject,
        source: str,
        *,
        is_move: bool = False,
        max_bytes_per_s: float | None = None,
        hold_s: float = 0.0,
        backend: str = "",
    ) -> Migration:
        """Get something from another node.

        Args:
            source: the node's name.
            is_move: the source gives it up; a prefix is copied in any case.
            max_bytes_per_s: for this migration; None for the node's limit only.
            hold_s: for so long after it has arrived its blocks are in use, and so stay here: time to admit a
                request that starts with them. Ended before by `Migration.release`, or when the node stops.
            backend: read by this one and no other; "" for the source's first that works.
        Raises:
            InvalidArgumentError: a limit or a time that is negative, a prefix that is to be moved.
            MigrationError: this node does not run.
            What else goes wrong is raised by `Migration.wait`.
        """
        if not 0 <= hold_s < math.inf:
            raise InvalidArgumentError(f"hold_s is {hold_s}; it is a number of seconds, 0 for not at all")
        return self._start_pull(
            secrets.token_bytes(16), subject, source, is_move, max_bytes_per_s or 0.0, hold_s, backend
        )

    def migrate(
        self,
        subject: Subject,
        target: str,
        *,
        is_move: bool = True,
        max_bytes_per_s: float | None = None,
        backend: str = "",
    ) -> Migration:
        """Give something to another node, which is asked to fetch it.

        The migration has the same id there. Raises: as `fetch`.
        """
        self._check_can_start(subject, is_move)
        limit = max_bytes_per_s or 0.0
        RateLimit(limit, self._clock)
        transfer_id = secrets.token_bytes(16)
        push = Push(
            PullSubject(transfer_id, subject, is_move, self.name, self.address, limit, backend),
            target,
            self._source,
            lambda message: self._links.call(target, message, self._call_s),
            self.lease_s,
            self._book.note,
        )
        self._book.add(push.migration)
        self._book.note(push.migration)
        self._submit(self._pushers, push.run, push.migration)
        return push.migration

    def list_migrations(self) -> list[MigrationStatus]:
        """Running ones and the last 1000 that have ended, in both directions, oldest first."""
        return [migration.get_status() for migration in self._book.list_all()]

    def find_migration(self, migration_id: str) -> Migration:
        """A running one, or one of the last 1000 that have ended.

        Raises:
            InvalidArgumentError: there is none; names those that run.
        """
        return self._book.find(migration_id)

    def check_invariants(self) -> None:
        """Verify what `migration/invariants.py` says. Raises CorruptedPoolError; changes nothing."""
        pulls = self._book.list_pulls()
        with self.site.lock:
            invariants.check(self.site, self._source, pulls, self._housekeeping.list_unsettled())

    # ---- what other nodes ask --------------------------------------------------------------------

    def answer(self, message: Message, caller: str) -> Message:
        """What this node replies. Raises what it can not do; safe for several threads.

        Args:
            caller: the node that asks, as it calls itself.
        """
        match message:
            case DescribeNode():
                return self.describe()
            case PrepareTransfer():
                return self._source.prepare(message)
            case AskChecksums():
                return self._source.compute_checksums(message)
            case RenewLease():
                return self._source.renew(message)
            case AcknowledgeTransfer():
                return self._source.acknowledge(message)
            case CancelTransfer():
                return self._source.cancel(message)
            case PullSubject():
                return self._answer_pull(message)
            case AskPull():
                return self._answer_ask_pull(message)
            case AnnounceNode() if self._registry is not None:
                return self._registry.announce(message)
            case ListNodes() if self._registry is not None:
                return self._registry.list_nodes()
        raise InvalidArgumentError(
            f"node {self.name!r} does not answer {type(message).__name__} of {caller!r}"
        )

    def _answer_pull(self, message: PullSubject) -> PullStarted:
        self._links.learn_address(message.source, message.source_address)
        if self._book.get(message.pull_id) is None:
            self._start_pull(
                message.pull_id,
                message.subject,
                message.source,
                message.is_move,
                message.max_bytes_per_s,
                backend=message.backend,
            )
        return PullStarted(message.pull_id.hex())

    def _answer_ask_pull(self, message: AskPull) -> PullOutcome:
        migration = self._book.get(message.pull_id)
        if not isinstance(migration, IncomingMigration):
            raise StaleTransferError(f"node {self.name!r} pulls nothing called {message.pull_id.hex()}")
        if message.cancel:
            migration.cancel()
        return PullOutcome(migration.get_status(), migration.new_ids)

    # ---- inside ----------------------------------------------------------------------------------

    def _check_can_start(self, subject: Subject, is_move: bool) -> None:
        if not self._is_running:
            raise MigrationError(f"node {self.name!r} does not run; start() it")
        if is_move and isinstance(subject, PrefixSubject):
            raise InvalidArgumentError(
                "a prefix is copied, not moved: the source keeps it while there is room"
            )

    def _start_pull(
        self,
        transfer_id: bytes,
        subject: Subject,
        source: str,
        is_move: bool,
        max_bytes_per_s: float,
        hold_s: float = 0.0,
        backend: str = "",
    ) -> Migration:
        self._check_can_start(subject, is_move)
        limit = RateLimit(max_bytes_per_s, self._clock)
        record = MigrationRecord(transfer_id, "in", source, subject, is_move)
        pull = Pull(
            self._settings, PeerOfPull(self._links, source, self._call_s, backend), record, limit, hold_s
        )
        migration = IncomingMigration(pull, self.lease_s)
        known = self._book.add(migration)
        if known is not migration:
            return known
        self._book.note(migration)
        self._submit(self._pullers, pull.run, migration)
        return migration

    def _submit(self, workers: Workers, run: Callable[[], object], migration: Migration) -> None:
        """Have a new migration run; without a thread for it there is no such migration."""
        try:
            workers.submit(run)
        except OutOfThreadsError:
            self._book.remove(migration)
            raise
