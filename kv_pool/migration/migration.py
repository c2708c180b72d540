"""`Migration`: one migration at one of its two nodes; `Push`: one that its source has started."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, ClassVar

from kv_pool.errors import KVPoolError, MigrationCancelledError, PeerUnavailableError, StaleTransferError
from kv_pool.ids import BlockId, NodeName
from kv_pool.migration.messages import (
    AskPull,
    CallFailed,
    CancelTransfer,
    Message,
    PrepareTransfer,
    PullOutcome,
    PullSubject,
    raise_failure,
)
from kv_pool.migration.source import SourceTransfers, Transfer, TransferState
from kv_pool.migration.status import MigrationPhase, MigrationStatus
from kv_pool.migration.subjects import describe_subject

if TYPE_CHECKING:
    from kv_pool.migration.verified_reads import PullSettings

_POLL_S = 0.05
_ADOPTION_S = 0.002
_TRIES = 3
_PROGRESS = ("num_blocks", "num_present_blocks", "num_done_blocks", "num_bytes", "num_descriptors")


class Migration(ABC):
    """A migration, returned by `Migrator`. Thread-safe.

    Attributes:
        transfer_id: 16 bytes, the same at both nodes; `migration_id` is its hex form, 32 digits.
        peer: the name of the other node.
        status: updated in place; `get_status` returns copies.
        error: the error that it failed with or is in doubt for; None otherwise.
        old_ids: the blocks' ids at the source, in the order of the subject; known there once they are leased.
        new_ids: the same blocks' ids at the target; [] until the migration is done.

    Args:
        wanted: the message that asks for it.
        on_change: called with the migration when it has entered a phase or made progress, without its lock.
    """

    direction: ClassVar[str]
    """`in` at the target, `out` at the source."""

    def __init__(
        self,
        wanted: PullSubject | PrepareTransfer,
        peer: NodeName,
        on_change: Callable[[Migration], object],
    ) -> None:
        self.transfer_id = wanted.transfer_id
        self.migration_id = wanted.transfer_id.hex()
        self.peer = peer
        self.subject = wanted.subject
        self.is_move = wanted.is_move
        self.status = MigrationStatus(
            self.migration_id,
            self.direction,
            peer,
            describe_subject(wanted.subject),
            wanted.is_move,
            MigrationPhase.WAITING,
            started=time.time(),
        )
        self.error: Exception | None = None
        self.old_ids: list[BlockId] = []
        self.new_ids: list[BlockId] = []
        self._on_change = on_change
        self._begun_s = time.monotonic()
        self._elapsed_s: float | None = None
        self._doubted_s = 0.0  # when it was first in doubt
        self._changed = threading.Condition()

    @property
    def phase(self) -> MigrationPhase:
        """The current phase."""
        return self.status.phase

    @abstractmethod
    def cancel(self) -> bool:
        """Cancel the migration: the source keeps the subject. Return False if it is too late."""

    def release(self) -> None:  # noqa: B027 (it does nothing at the source)
        """End the hold of `fetch(..., hold_s=...)` on the arrived blocks. No-op at the source.

        Call it when the blocks are in use or no longer needed. Safe to repeat, and after the hold has ended.
        If called before the blocks have arrived, they will not be held.
        """

    def get_status(self) -> MigrationStatus:
        """Return a copy of the current status."""
        status = copy(self.status)
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
            if self.phase is MigrationPhase.IN_DOUBT and not self._doubted_s:
                self._doubted_s = time.monotonic()
            self._changed.notify_all()

    def set_error(self, error: Exception | None) -> None:
        """Set the error, also in the status; None clears it."""
        self.error = error
        self.status.error = "" if error is None else type(error).__name__
        self.status.error_message = "" if error is None else str(error)

    def _is_not_waited_for(self) -> bool:
        return self.phase.is_ended


class OutgoingMigration(Migration):
    """A migration at its source, requested by the target: it follows the transfer of the same id.

    Args:
        source: the transfers of this node.
    """

    direction: ClassVar[str] = "out"

    def __init__(
        self,
        wanted: PullSubject | PrepareTransfer,
        peer: NodeName,
        on_change: Callable[[Migration], object],
        source: SourceTransfers,
    ) -> None:
        super().__init__(wanted, peer, on_change)
        self._source = source

    def cancel(self) -> bool:
        return not self.phase.is_ended and self._end_lease("cancelled by the source")

    def follow(self, transfer: Transfer) -> None:
        """Record that the transfer was prepared or has ended."""
        outcome = transfer.outcome
        if outcome is None:
            self.old_ids = [block.block_id for block in transfer.selection.offered]
            self.status.num_blocks = len(self.old_ids)
            self._enter(MigrationPhase.READING, [])
        elif outcome.state is TransferState.ACKNOWLEDGED:
            self._enter(MigrationPhase.DONE, list(outcome.new_ids))
        elif outcome.state is TransferState.CANCELLED:
            why = f": {outcome.reason}" if outcome.reason else ""
            error = MigrationCancelledError(f"the transfer was cancelled{why}")
            self._enter(MigrationPhase.CANCELLED, [], error)
        else:
            self._enter(MigrationPhase.FAILED, [], StaleTransferError(outcome.reason))

    def _enter(self, phase: MigrationPhase, new_ids: list[BlockId], error: Exception | None = None) -> bool:
        """Enter a phase and report it. Return False, with nothing changed, if the migration had ended."""
        with self._changed:
            if self.phase.is_ended:
                return False
            self.set_error(error)
            self.status.phase, self.new_ids = phase, new_ids
        self._on_change(self)
        return True

    def _end_lease(self, reason: str) -> bool:
        """End the lease of the transfer. Return False if the target has acknowledged it."""
        return not self._source.cancel(CancelTransfer(self.transfer_id, reason)).is_acknowledged


class Push(OutgoingMigration):
    """A migration started at its source. One thread calls `run`.

    The transfer id is this migration's id, so this node's own `SourceTransfers` decides the fate of the
    blocks. The target only reports its progress and its error.

    The target is polled every 0.05 s, or every tenth of a lease if that is shorter.
    """

    def __init__(
        self, settings: PullSettings, wanted: PullSubject, target: NodeName, source: SourceTransfers
    ) -> None:
        super().__init__(wanted, target, settings.on_change, source)
        self._settings = settings
        self._wanted = wanted
        self._poll_s = min(_POLL_S, settings.lease_s / 10)
        self._woken = threading.Event()  # it is acknowledged or has ended

    def run(self) -> None:
        try:
            self._ask_until_started()
            self._ask_until_ended()
        except Exception as error:
            self._break_off(error)
        if self.phase is MigrationPhase.CANCELLED:
            # The target would notice by itself, but only after further reads.
            with suppress(KVPoolError):
                self._call(AskPull(self.transfer_id, cancel=True))

    def cancel(self) -> bool:
        error = MigrationCancelledError("the migration was cancelled; this node keeps the blocks")
        return super().cancel() and self._enter(MigrationPhase.CANCELLED, [], error)

    def follow(self, transfer: Transfer) -> None:
        """Record the same. A transfer that the target has ended ends the migration when it reports that."""
        outcome = transfer.outcome
        if outcome is None or outcome.state is TransferState.EXPIRED:
            super().follow(transfer)
        elif outcome.state is TransferState.ACKNOWLEDGED:
            self._enter(MigrationPhase.ACKNOWLEDGING, list(outcome.new_ids))

    def _enter(self, phase: MigrationPhase, new_ids: list[BlockId], error: Exception | None = None) -> bool:
        has_entered = super()._enter(phase, new_ids, error)
        if phase is not MigrationPhase.READING:
            self._woken.set()
        return has_entered

    def _call(self, message: Message) -> Message:
        return self._settings.links.call(self.peer, message, self._settings.call_s)

    def _ask_until_started(self) -> None:
        for num_left in reversed(range(_TRIES)):
            try:
                self._call(self._wanted)
                return
            except PeerUnavailableError:
                if not num_left or self._woken.wait(self._poll_s):
                    raise

    def _ask_until_ended(self) -> None:
        """Poll the target until it reports the end, or until it stops answering after its acknowledgement."""
        num_failures = 0
        while True:
            is_acknowledged = self.phase is MigrationPhase.ACKNOWLEDGING
            self._woken.wait(_ADOPTION_S if is_acknowledged else self._poll_s)
            self._woken.clear()
            if self.phase.is_ended:
                return
            is_acknowledged = self.phase is MigrationPhase.ACKNOWLEDGING
            try:
                outcome = self._call(AskPull(self.transfer_id))
            except (PeerUnavailableError, StaleTransferError) as error:
                if is_acknowledged:
                    self._enter(MigrationPhase.DONE, self.new_ids)
                    return
                if isinstance(error, StaleTransferError):
                    raise PeerUnavailableError(
                        f"node {self.peer!r} no longer knows the migration; it may have been restarted"
                    ) from error
                num_failures += 1
                # While the blocks are leased, the lease decides: the target may still reach this node.
                if num_failures >= _TRIES and not self._source.is_prepared(self.transfer_id):
                    raise
                continue
            num_failures = 0
            if isinstance(outcome, PullOutcome):
                self._note(outcome)

    def _note(self, outcome: PullOutcome) -> None:
        status = outcome.status
        with self._changed:
            if not self.phase.is_ended:
                for name in _PROGRESS:
                    setattr(self.status, name, getattr(status, name))
        if status.phase is MigrationPhase.DONE:
            # Has an effect only for a copy whose acknowledgement was lost.
            self._end_lease("the copy has arrived")
            self._enter(MigrationPhase.DONE, outcome.new_ids)
        elif status.phase.is_ended:
            raise_failure(CallFailed(status.error, status.error_message), self.peer)

    def _break_off(self, error: Exception) -> None:
        """End the lease: from here on the target cannot complete the transfer, unless it already has."""
        is_ours = self._end_lease(str(error)[:200])
        if not is_ours and isinstance(error, PeerUnavailableError):
            # The target's report is missing, but it has acknowledged.
            outcome = self._source.find_outcome(self.transfer_id)
            self._enter(MigrationPhase.DONE, [] if outcome is None else list(outcome.new_ids))
            return
        is_wanted = isinstance(error, MigrationCancelledError)
        self._enter(MigrationPhase.CANCELLED if is_wanted else MigrationPhase.FAILED, [], error)
