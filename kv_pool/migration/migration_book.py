"""`MigrationBook`: the migrations of a node, running and ended, and what follows from their changes."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from kv_pool.errors import InvalidArgumentError, StaleTransferError
from kv_pool.migration.housekeeping import Housekeeping
from kv_pool.migration.messages import CancelTransfer
from kv_pool.migration.migration import IncomingMigration, Migration, OutgoingMigration
from kv_pool.migration.source import SourceTransfers, Transfer, TransferState
from kv_pool.migration.status import MigrationPhase, MigrationRecord, MigrationStatus
from kv_pool.migration.target import Pull

_logger = logging.getLogger(__name__)

MAX_ENDED: Final = 1000


class MigrationBook:
    """The migrations of a node by their transfer ids: those that run, and the last 1000 that have ended.

    Safe for several threads.

    Args:
        on_phase: called with a status at each change, by the thread that made it and before it goes on.
        lease_s: of the node.
    """

    def __init__(
        self, name: str, lease_s: float, on_phase: Callable[[MigrationStatus], object] | None
    ) -> None:
        self._name = name
        self._lease_s = lease_s
        self._on_phase = on_phase
        self._lock = threading.Lock()
        self._migrations: OrderedDict[bytes, Migration] = OrderedDict()
        self._ended: deque[bytes] = deque()
        # Pulls that hold what has arrived, and may be forgotten as migrations before it is released.
        self._holding: list[Pull] = []
        self._source: SourceTransfers
        self._housekeeping: Housekeeping

    def attach(self, source: SourceTransfers, housekeeping: Housekeeping) -> None:
        """Set what is asked for transfers, and what is told of migrations."""
        self._source, self._housekeeping = source, housekeeping

    # ---- looking ---------------------------------------------------------------------------------

    def get(self, transfer_id: bytes) -> Migration | None:
        """The migration with this id; None if it is not known."""
        with self._lock:
            return self._migrations.get(transfer_id)

    def list_all(self) -> list[Migration]:
        """Oldest first."""
        with self._lock:
            return list(self._migrations.values())

    def list_running(self) -> list[Migration]:
        """Those that have not ended, oldest first."""
        return [migration for migration in self.list_all() if not migration.phase.is_ended]

    def list_pulls(self) -> list[Pull]:
        """All that run, that are remembered, or that hold what has arrived."""
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
            f"node {self._name!r} knows no migration {migration_id!r}; running are: "
            f"{', '.join(running) or 'none'}"
        )

    # ---- changing --------------------------------------------------------------------------------

    def add(self, migration: Migration) -> Migration:
        """Enter a new migration. Returns it, or the one with its id that is known already."""
        with self._lock:
            return self._migrations.setdefault(migration.transfer_id, migration)

    def remove(self, migration: Migration) -> None:
        """Forget a migration that did not begin."""
        with self._lock:
            del self._migrations[migration.transfer_id]

    def release_held(self) -> None:
        """Release what pulls hold."""
        for pull in self._holding:
            pull.release()

    def note_pull(self, record: MigrationRecord) -> None:
        """A pull has entered a phase, or finished a batch."""
        with self._lock:
            migration = self._migrations[record.transfer_id]
            assert isinstance(migration, IncomingMigration)
            if migration.pull.is_holding():
                self._holding = [one for one in self._holding if one.is_holding()]
                self._holding.append(migration.pull)
        self.note(migration)

    def note_transfer(self, transfer: Transfer) -> None:
        """Something was lent, or is not any more."""
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
            return  # a node that migrates to itself, which the site refuses
        outcome = self._source.find_outcome(message.transfer_id)
        if outcome is None:
            migration.note_lent([block.block_id for block in transfer.selection.offered])
        elif outcome.state is TransferState.ACKNOWLEDGED:
            migration.note_acknowledged(list(outcome.new_ids))
        elif outcome.state is TransferState.EXPIRED:
            error = StaleTransferError(
                f"node {message.target!r} has given no sign of life for {self._lease_s:g} s; the blocks stay "
                "here"
            )
            migration.end(MigrationPhase.FAILED, [], error)
        else:
            migration.note_cancelled(outcome.reason)
        self.note(migration)

    def _take_back(self, transfer_id: bytes) -> bool:
        return not self._source.cancel(
            CancelTransfer(transfer_id, "the source wants them back")
        ).is_acknowledged

    def note(self, migration: Migration) -> None:
        """A migration has changed."""
        is_ended = migration.phase.is_ended
        self._housekeeping.note_phase(migration)
        if self._on_phase is not None:
            try:
                self._on_phase(migration.get_status())
            except Exception:
                _logger.exception("on_phase of node %s has failed; the migration goes on", self._name)
        migration.note_change()
        if is_ended:
            self._forget_oldest(migration.transfer_id)

    def _forget_oldest(self, transfer_id: bytes) -> None:
        with self._lock:
            self._ended.append(transfer_id)
            if len(self._ended) > MAX_ENDED:
                self._migrations.pop(self._ended.popleft(), None)
