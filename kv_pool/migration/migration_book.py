"""`MigrationBook`: the running and ended migrations of a node; `Housekeeping`: a node's periodic work."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import NodeName, TransferId
from kv_pool.loggers import get_logger
from kv_pool.migration.messages import MigrationPhase, MigrationStatus
from kv_pool.migration.migration import Migration
from kv_pool.migration.outgoing import OutgoingMigration
from kv_pool.migration.source import SourceTransfers, Transfer
from kv_pool.migration.target import Pull
from kv_pool.migration.verified_reads import PullSettings
from kv_pool.threads import start_thread

_logger = get_logger(__name__)

MAX_ENDED: Final = 1000
_MAX_TICK_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0


class MigrationBook:
    """The migrations of a node by transfer id: the running ones and the last 1000 that ended. Thread-safe.

    Older pulls that hold arrived blocks stay in addition, until a migration ends after the hold has.

    Args:
        on_phase: called with a status at each change, synchronously by the thread that made the change.
    """

    def __init__(self, name: NodeName, on_phase: Callable[[MigrationStatus], object] | None) -> None:
        self._name = name
        self._on_phase = on_phase
        self._lock = threading.Lock()
        self._migrations: dict[TransferId, Migration] = {}
        self._num_ended: Counter[str] = Counter()

    # ---- looking ---------------------------------------------------------------------------------

    def get(self, transfer_id: TransferId) -> Migration | None:
        """Return the migration with this id; None if there is none."""
        with self._lock:
            return self._migrations.get(transfer_id)

    def list_all(self) -> list[Migration]:
        """Return all migrations, oldest first."""
        with self._lock:
            return list(self._migrations.values())

    def list_running(self) -> list[Migration]:
        """Return the migrations that have not ended, oldest first."""
        return [migration for migration in self.list_all() if not migration.phase.is_ended]

    def count(self) -> dict[str, int]:
        """Return the number of migrations in each phase: running ones, and those that have ended so far."""
        found = self._num_ended + Counter(one.phase.value for one in self.list_running())
        return {phase.value: found[phase.value] for phase in MigrationPhase}

    def list_pulls(self) -> list[Pull]:
        """Return the pulls of all migrations."""
        return [one for one in self.list_all() if isinstance(one, Pull)]

    def find(self, migration_id: str) -> Migration:
        """See `Migrator.find_migration`."""
        for migration in self.list_all():
            if migration.migration_id == migration_id:
                return migration
        running = [found.migration_id for found in self.list_running()]
        raise InvalidArgumentError(
            f"node {self._name!r} has no migration {migration_id!r}; running: {', '.join(running) or 'none'}"
        )

    # ---- changing --------------------------------------------------------------------------------

    def add(self, migration: Migration) -> Migration:
        """Add a migration. Return it, or the migration that already has its id."""
        with self._lock:
            return self._migrations.setdefault(migration.transfer_id, migration)

    def remove(self, migration: Migration) -> None:
        """Remove a migration that was not started."""
        with self._lock:
            del self._migrations[migration.transfer_id]

    def note_transfer(self, transfer: Transfer, source: SourceTransfers) -> None:
        """Handle a transfer of this source that was prepared or has ended."""
        message = transfer.message
        with self._lock:
            migration = self._migrations.get(message.transfer_id)
            if migration is None:
                migration = OutgoingMigration(message, message.target, self.note, source)
                self._migrations[message.transfer_id] = migration
        if isinstance(migration, OutgoingMigration):  # else of a node to itself, which the site refuses
            migration.follow(transfer)

    def note(self, migration: Migration) -> None:
        """Notify `on_phase` and waiting threads of a changed migration."""
        is_ended = migration.phase.is_ended
        if is_ended and migration.ended_s is None:
            self._num_ended[migration.phase.value] += 1
        if self._on_phase is not None:
            try:
                self._on_phase(migration.get_status())
            except Exception:
                _logger.exception("on_phase of node %s failed; the migration continues", self._name)
        migration.note_change()
        if is_ended:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forget the migrations before the last `MAX_ENDED` that ended, except those that hold blocks.

        By the time of their end, not by their phase: one whose end is not reported yet is not forgotten.
        """
        with self._lock:
            over = [
                (one.ended_s, transfer_id)
                for transfer_id, one in self._migrations.items()
                if one.ended_s is not None and not one.is_holding()
            ]
            for _, transfer_id in sorted(over)[:-MAX_ENDED]:
                del self._migrations[transfer_id]


class Housekeeping:
    """A thread that ticks every tenth of a lease, at least every second.

    | task | when |
    |---|---|
    | end expired leases of this site's blocks | at each tick |
    | release quarantined blocks | once their reader reports that it no longer writes |
    | renew the lease at the source of a pull in phase READING | at once, then every third of a lease |
    | ask the source of a move in phase IN_DOUBT again | after 1/30 of a lease, then 1/15, and so on |
    """

    def __init__(self, settings: PullSettings, source: SourceTransfers, book: MigrationBook) -> None:
        self._settings = settings
        self._site = settings.site
        self._source = source
        self._book = book
        # Pull -> its phase, the time of the next call, and the pause after it.
        self._due: dict[Pull, tuple[MigrationPhase, float, float]] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Raises OutOfThreadsError."""
        self._thread = start_thread(f"kv_pool {self._settings.name} leases", self._run)

    def stop(self) -> None:
        """Stop the thread after its current task."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def settle(self) -> None:
        """Release quarantined blocks whose reader no longer writes."""
        with self._site.lock:
            unsettled = list(self._settings.unsettled)
        for hold, reader in unsettled:
            if reader.is_settled():
                with self._site.lock:
                    hold.release()
                    self._settings.unsettled.remove((hold, reader))

    def _run(self) -> None:
        while not self._stopping.wait(min(_MAX_TICK_S, self._settings.lease_s / 10)):
            try:
                self._source.expire()
                with self._site.lock:
                    self._site.leases.expire()
                self.settle()
                self._remind()
            except Exception:
                _logger.exception(
                    "housekeeping of node %s failed; it continues at the next tick", self._settings.name
                )

    def _remind(self) -> None:
        """Call the sources of the pulls that are due. The calls of a pull start again with its phase."""
        now, due = self._settings.clock(), {}
        for migration in self._book.list_running():
            phase = migration.phase
            is_in_doubt = phase is MigrationPhase.IN_DOUBT
            is_waiting = is_in_doubt or phase is MigrationPhase.READING
            if not is_waiting or not isinstance(migration, Pull):
                continue
            pause_s = self._settings.lease_s / (30 if is_in_doubt else 3)
            planned = (phase, now, pause_s)
            known = self._due.get(migration, planned)
            _, time_s, pause_s = known if known[0] is phase else planned
            if time_s <= now:
                self._settings.askers.submit(migration.resolve if is_in_doubt else migration.renew)
                time_s = now + pause_s
                if is_in_doubt:
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S, self._settings.lease_s)
            due[migration] = (phase, time_s, pause_s)
        self._due = due
