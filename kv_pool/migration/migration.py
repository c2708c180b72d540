"""`Migration`: a handle on one migration of a node, to wait for it, query it and cancel it."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy

from kv_pool.errors import MigrationCancelledError
from kv_pool.ids import BlockId
from kv_pool.migration.status import MigrationPhase, MigrationRecord, MigrationStatus
from kv_pool.migration.target import Pull


class Migration(ABC):
    """A handle on a migration, returned by `Migrator`. Thread-safe.

    Attributes:
        migration_id: 32 hex digits, the same at both nodes.
        peer: the name of the other node.
    """

    def __init__(self, record: MigrationRecord) -> None:
        self.record = record
        self.transfer_id = record.transfer_id
        self.migration_id = record.status.migration_id
        self.peer = record.status.peer
        self.subject = record.subject
        self.is_move = record.is_move
        self._begun_s = time.monotonic()
        self._elapsed_s: float | None = None
        self._changed = threading.Condition()

    @property
    def phase(self) -> MigrationPhase:
        """The current phase."""
        return self.record.status.phase

    @property
    def error(self) -> Exception | None:
        """The error of a migration that has failed or is in doubt; None otherwise."""
        return self.record.error

    @property
    def new_ids(self) -> list[BlockId]:
        """The blocks' ids at the target, in the order of the subject; [] until the migration is done."""
        return self.record.new_ids

    @property
    def old_ids(self) -> list[BlockId]:
        """The blocks' ids at the source, in the same order; known at the source once they are leased."""
        return self.record.old_ids

    @abstractmethod
    def cancel(self) -> bool:
        """Cancel the migration: the source keeps the subject. Return False if it is too late."""

    @abstractmethod
    def release(self) -> None:
        """End the hold of `fetch(..., hold_s=...)` on the arrived blocks.

        Call it when the blocks are in use or no longer needed. Safe to repeat, and after the hold has ended.
        If called before the blocks have arrived, they will not be held.
        """

    def get_status(self) -> MigrationStatus:
        """Return a copy of the current status."""
        status = copy(self.record.status)
        elapsed_s = time.monotonic() - self._begun_s if self._elapsed_s is None else self._elapsed_s
        status.elapsed_s = elapsed_s
        status.bytes_per_s = status.num_bytes / elapsed_s if elapsed_s > 0 else 0.0
        return status

    def wait(self, timeout_s: float | None = None) -> list[BlockId]:
        """Wait until the migration has ended.

        Args:
            timeout_s: None to wait without a limit. The wait also ends after one lease in doubt.
        Returns:
            The blocks' ids at the target, in the order of the subject.
        Raises:
            MigrationInDoubtError: the source has not confirmed that it released a move; wait again later.
            TimeoutError: the migration is still running.
            The error that the migration failed with.
        """
        with self._changed:
            self._changed.wait_for(self._is_not_waited_for, timeout_s)
            phase, error = self.phase, self.error
        if phase is MigrationPhase.DONE:
            return list(self.new_ids)
        if error is not None and (phase.is_ended or phase is MigrationPhase.IN_DOUBT):
            raise error
        raise TimeoutError(f"migration {self.migration_id} is still {phase.value} after {timeout_s} s")

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds; return True if the migration has ended, successfully or not."""
        with self._changed:
            return self._changed.wait_for(lambda: self.phase.is_ended, timeout_s)

    def note_change(self) -> None:
        """Wake the waiting threads. Called by the migrator."""
        with self._changed:
            if self.phase.is_ended and self._elapsed_s is None:
                self._elapsed_s = time.monotonic() - self._begun_s
            self._changed.notify_all()

    def _is_not_waited_for(self) -> bool:
        return self.phase.is_ended


class IncomingMigration(Migration):
    """A migration at its target."""

    def __init__(self, pull: Pull, lease_s: float) -> None:
        super().__init__(pull.record)
        self.pull = pull
        self._lease_s = lease_s
        self._doubted_since: float | None = None

    def cancel(self) -> bool:
        return self.pull.cancel()

    def release(self) -> None:
        self.pull.release()

    def assume_source_gone(self) -> bool:
        """Resolve IN_DOUBT in favour of this node, which takes the subject over.

        Call only if the source is known to be dead, or was made to drop the subject: otherwise both nodes
        would use it. Return False, with nothing changed, if the migration is not in doubt.
        """
        return self.pull.assume_source_gone()

    def note_change(self) -> None:
        if self.phase is MigrationPhase.IN_DOUBT and self._doubted_since is None:
            self._doubted_since = time.monotonic()
        super().note_change()

    def _is_not_waited_for(self) -> bool:
        since = self._doubted_since
        if self.phase is MigrationPhase.IN_DOUBT and since is not None:
            return time.monotonic() - since > self._lease_s
        return self.phase.is_ended


class OutgoingMigration(Migration):
    """A migration at its source: a transfer that a target requested, or a push.

    Args:
        cancel: ends the lease of the transfer; returns False if the target has acknowledged it.
        is_push: this node started the migration and polls the target for its progress.

    Attributes:
        woken: set when the migration is acknowledged or has ended.
    """

    def __init__(self, record: MigrationRecord, cancel: Callable[[], bool], is_push: bool) -> None:
        super().__init__(record)
        self.is_push = is_push
        self._cancel = cancel
        self.woken = threading.Event()

    def cancel(self) -> bool:
        return not self.phase.is_ended and self._cancel()

    def release(self) -> None:
        """Do nothing: `hold_s` holds blocks at the target only."""

    def note_leased(self, block_ids: list[BlockId]) -> None:
        """Record that the target has leased these blocks."""
        with self._changed:
            if not self.phase.is_ended:
                self.record.status.phase = MigrationPhase.READING
                self.record.status.num_blocks = len(block_ids)
                self.record.old_ids = block_ids

    def note_progress(self, reported: MigrationStatus) -> None:
        """Record the progress that the target reports."""
        with self._changed:
            if not self.phase.is_ended:
                self.record.take_progress(reported)

    def note_acknowledged(self, new_ids: list[BlockId]) -> None:
        """Record the acknowledgement. A push ends later, when the target reports DONE."""
        if not self.is_push:
            self.end(MigrationPhase.DONE, new_ids, None)
            return
        with self._changed:
            if not self.phase.is_ended:
                self.record.status.phase, self.record.new_ids = MigrationPhase.ACKNOWLEDGING, new_ids
        self.woken.set()

    def note_cancelled(self, reason: str) -> None:
        """Record the cancellation. A push ends later, with the error that the target reports."""
        if not self.is_push:
            why = f": {reason}" if reason else ""
            error = MigrationCancelledError(f"the transfer was cancelled{why}")
            self.end(MigrationPhase.CANCELLED, [], error)

    def end(self, phase: MigrationPhase, new_ids: list[BlockId], error: Exception | None) -> bool:
        """End the migration. Return False, with nothing changed, if it had already ended."""
        with self._changed:
            if self.phase.is_ended:
                return False
            self.record.set_error(error)
            self.record.status.phase, self.record.new_ids = phase, new_ids
        self.woken.set()
        return True
