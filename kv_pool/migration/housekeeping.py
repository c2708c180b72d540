"""`Housekeeping`: periodic work of a node: expire leases, renew leases at sources, resolve doubt."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kv_pool.ids import NodeName
from kv_pool.manager.leases import Lease
from kv_pool.migration.migration import IncomingMigration, Migration
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.source import SourceTransfers
from kv_pool.migration.status import MigrationPhase
from kv_pool.migration.transfer_backend import BlockReader
from kv_pool.migration.workers import Workers
from kv_pool.threads import start_thread

_logger = logging.getLogger(__name__)

_MAX_TICK_S = 1.0
_MAX_PAUSE_S = 30.0


class Housekeeping:
    """A thread that ticks every tenth of a lease, at least every second.

    | task | when |
    |---|---|
    | end or quarantine expired leases of this site's blocks | at each tick |
    | release quarantined blocks | once their reader reports that it no longer writes |
    | renew the lease at the source of a pull in phase READING | every third of a lease |
    | ask the source of a move in phase IN_DOUBT again | after 1/30 of a lease, then 1/15, and so on |

    Args:
        lease_s, clock: of the node.
        askers: threads for calls to other nodes.
    """

    def __init__(
        self,
        name: NodeName,
        site: PoolSite,
        source: SourceTransfers,
        lease_s: float,
        clock: Callable[[], float],
        askers: Workers,
    ) -> None:
        self._name = name
        self._site = site
        self._source = source
        self._lease_s = lease_s
        self._clock = clock
        self._askers = askers
        self._lock = threading.Lock()
        # Pull -> time of the next call, and the pause after it.
        self._due: dict[IncomingMigration, tuple[float, float]] = {}
        self._unsettled: list[tuple[Lease, BlockReader]] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Raises OutOfThreadsError."""
        self._thread = start_thread(f"kv_pool {self._name} leases", self._run)

    def stop(self) -> None:
        """Stop the thread after its current task."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def note_phase(self, migration: Migration) -> None:
        """Schedule or unschedule the periodic calls of a migration that has changed."""
        if not isinstance(migration, IncomingMigration):
            return
        phase, now = migration.phase, self._clock()
        with self._lock:
            if phase is MigrationPhase.READING:
                self._due.setdefault(migration, (now + self._lease_s / 3, self._lease_s / 3))
            elif phase is MigrationPhase.IN_DOUBT:
                self._due.setdefault(migration, (now, self._lease_s / 30))
            else:
                self._due.pop(migration, None)

    def note_unsettled(self, lease: Lease, reader: BlockReader) -> None:
        """Quarantine blocks that a reader may still write to. Called with the site's lock."""
        self._unsettled.append((lease, reader))

    def list_unsettled(self) -> list[Lease]:
        """Return the write leases in quarantine. Called with the site's lock."""
        return [lease for lease, _ in self._unsettled]

    def settle(self) -> None:
        """Release quarantined blocks whose reader no longer writes."""
        with self._site.lock:
            unsettled = list(self._unsettled)
        for lease, reader in unsettled:
            if reader.is_settled():
                with self._site.lock:
                    lease.release()
                    self._unsettled.remove((lease, reader))

    def _run(self) -> None:
        while not self._stopping.wait(min(_MAX_TICK_S, self._lease_s / 10)):
            try:
                self._source.expire()
                with self._site.lock:
                    self._site.leases.expire()
                self.settle()
                self._remind()
            except Exception:
                _logger.exception("housekeeping of node %s failed; it continues at the next tick", self._name)

    def _remind(self) -> None:
        now = self._clock()
        with self._lock:
            due = [migration for migration, (time_s, _) in self._due.items() if time_s <= now]
            for migration in due:
                _, pause_s = self._due[migration]
                longest_s = min(_MAX_PAUSE_S, self._lease_s)
                is_in_doubt = migration.phase is MigrationPhase.IN_DOUBT
                self._due[migration] = (
                    now + pause_s,
                    min(longest_s, 2 * pause_s) if is_in_doubt else pause_s,
                )
        for migration in due:
            pull = migration.pull
            self._askers.submit(pull.resolve if migration.phase is MigrationPhase.IN_DOUBT else pull.renew)
