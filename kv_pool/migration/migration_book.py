"""`MigrationBook`: the running and ended migrations of a node, and the handling of their changes."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from kv_pool.errors import InvalidArgumentError, StaleTransferError
from kv_pool.ids import NodeName, TransferId
from kv_pool.migration.housekeeping import Housekeeping
from kv_pool.migration.messages import CancelTransfer
from kv_pool.migration.migration import IncomingMigration, Migration, OutgoingMigration
from kv_pool.migration.source import SourceTransfers, Transfer, TransferState
from kv_pool.migration.status import MigrationPhase, MigrationRecord, MigrationStatus
from kv_pool.migration.target import Pull

_logger = logging.getLogger(__name__)

MAX_ENDED: Final = 1000


class MigrationBook:
    """The migrations of a node by transfer id: the running ones and the last 1000 that ended. Thread-safe.

    Args:
        lease_s: of the node.
        on_phase: called with a status at each change, synchronously by the thread that made the change.
    """

    def __init__(
        self, name: NodeName, lease_s: float, on_phase: Callable[[MigrationStatus], object] | None
    ) -> None:
        self._name = name
        self._lease_s = lease_s
        self._on_phase = on_phase
        self._lock = threading.Lock()
        self._migrations: OrderedDict[TransferId, Migration] = OrderedDict()
        self._ended: deque[TransferId] = deque()
        # Pulls that hold arrived blocks; their migrations may be forgotten before the hold ends.
        self._holding: list[Pull] = []
        self._source: SourceTransfers
        self._housekeeping: Housekeeping

    def attach(self, source: SourceTransfers, housekeeping: Housekeeping) -> None:
        """Set the transfers of the node, and the housekeeping to notify of changes. Called once."""
        self._source, self._housekeeping = source, housekeeping

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

    def list_pulls(self) -> list[Pull]:
        """Return the pulls of all migrations, and other pulls that still hold arrived blocks."""
        with self._lock:
            pulls = [one.pull for one in self._migrations.values() if isinstance(one, IncomingMigration)]
            return pulls + [pull for pull in self._holding if pull.transfer_id not in self._migrations]

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

    def release_held(self) -> None:
        """Release the blocks that pulls hold."""
        for pull in self._holding:
            pull.release()

    def note_pull(self, record: MigrationRecord) -> None:
        """Handle a pull that has entered a phase or finished a batch."""
        with self._lock:
            migration = self._migrations[record.transfer_id]
            assert isinstance(migration, IncomingMigration)
            if migration.pull.is_holding():
                self._holding = [one for one in self._holding if one.is_holding()]
                self._holding.append(migration.pull)
        self.note(migration)

    def note_transfer(self, transfer: Transfer) -> None:
        """Handle a transfer that was prepared or has ended."""
        message = transfer.message
        with self._lock:
            migration = self._migrations.get(message.transfer_id)
            if migration is None:
                migration = OutgoingMigration(
                    MigrationRecord(
                        message.transfer_id,
                        "out",
                        message.target,
                        message.subject,
                        message.is_move,
                        MigrationPhase.READING,
                    ),
                    lambda: self._take_back(message.transfer_id),
                    is_push=False,
                )
                self._migrations[message.transfer_id] = migration
        if not isinstance(migration, OutgoingMigration):
            return  # a migration of a node to itself, which the site refuses
        outcome = self._source.find_outcome(message.transfer_id)
        if outcome is None:
            migration.note_leased([block.block_id for block in transfer.selection.offered])
        elif outcome.state is TransferState.ACKNOWLEDGED:
            migration.note_acknowledged(list(outcome.new_ids))
        elif outcome.state is TransferState.EXPIRED:
            error = StaleTransferError(
                f"node {message.target!r} did not renew its lease for {self._lease_s:g} s, or has ended; the "
                "source keeps its blocks"
            )
            migration.end(MigrationPhase.FAILED, [], error)
        else:
            migration.note_cancelled(outcome.reason)
        self.note(migration)

    def _take_back(self, transfer_id: TransferId) -> bool:
        return not self._source.cancel(CancelTransfer(transfer_id, "cancelled by the source")).is_acknowledged

    def note(self, migration: Migration) -> None:
        """Notify the housekeeping, `on_phase` and waiting threads of a changed migration."""
        is_ended = migration.phase.is_ended
        self._housekeeping.note_phase(migration)
        if self._on_phase is not None:
            try:
                self._on_phase(migration.get_status())
            except Exception:
                _logger.exception("on_phase of node %s failed; the migration continues", self._name)
        migration.note_change()
        if is_ended:
            self._forget_oldest(migration.transfer_id)

    def _forget_oldest(self, transfer_id: TransferId) -> None:
        with self._lock:
            self._ended.append(transfer_id)
            if len(self._ended) > MAX_ENDED:
                self._migrations.pop(self._ended.popleft(), None)
