"""`Push`: a migration started at its source, which asks the target to pull and polls for the outcome."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from kv_pool.errors import KVPoolError, MigrationCancelledError, PeerUnavailableError, StaleTransferError
from kv_pool.ids import BlockId, NodeName
from kv_pool.migration.calls import raise_failure
from kv_pool.migration.messages import (
    AskPull,
    CallFailed,
    CancelTransfer,
    Message,
    PullOutcome,
    PullSubject,
)
from kv_pool.migration.migration import Migration, OutgoingMigration
from kv_pool.migration.source import SourceTransfers
from kv_pool.migration.status import MigrationPhase, MigrationRecord

_POLL_S = 0.05
_ADOPTION_S = 0.002
_TRIES = 3


class Push:
    """A migration started at its source. One thread calls `run`.

    The transfer id is this migration's id, so this node's own `SourceTransfers` decides the fate of the
    blocks. The target only reports its progress and its error.

    Args:
        call: sends a message to the target; raises its error, or PeerUnavailableError.
        lease_s: of the node; the target is polled every 0.05 s, or every tenth of a lease if that is shorter.
        on_change: called with the migration when it has ended.
    """

    def __init__(
        self,
        message: PullSubject,
        target: NodeName,
        source: SourceTransfers,
        call: Callable[[Message], Message],
        lease_s: float,
        on_change: Callable[[Migration], object],
    ) -> None:
        record = MigrationRecord(message.pull_id, "out", target, message.subject, message.is_move)
        self.migration = OutgoingMigration(record, self._cancel, is_push=True)
        self._message = message
        self._target = target
        self._source = source
        self._call = call
        self._poll_s = min(_POLL_S, lease_s / 10)
        self._on_change = on_change

    def run(self) -> None:
        """Run the migration to its end. An error becomes the migration's error."""
        try:
            self._ask_until_started()
            self._ask_until_ended()
        except Exception as error:
            self._break_off(error)
        if self.migration.phase is MigrationPhase.CANCELLED:
            # The target would notice by itself, but only after further reads.
            with suppress(KVPoolError):
                self._call(AskPull(self._message.pull_id, cancel=True))

    def _ask_until_started(self) -> None:
        for num_left in reversed(range(_TRIES)):
            try:
                self._call(self._message)
                return
            except PeerUnavailableError:
                if not num_left or self.migration.woken.wait(self._poll_s):
                    raise

    def _ask_until_ended(self) -> None:
        """Poll the target until it reports the end, or until it stops answering after its acknowledgement."""
        num_failures = 0
        while True:
            is_acknowledged = self.migration.phase is MigrationPhase.ACKNOWLEDGING
            self.migration.woken.wait(_ADOPTION_S if is_acknowledged else self._poll_s)
            self.migration.woken.clear()
            if self.migration.phase.is_ended:
                return
            is_acknowledged = self.migration.phase is MigrationPhase.ACKNOWLEDGING
            try:
                outcome = self._call(AskPull(self._message.pull_id))
            except (PeerUnavailableError, StaleTransferError) as error:
                if is_acknowledged:
                    self._end(MigrationPhase.DONE, self.migration.new_ids, None)
                    return
                if isinstance(error, StaleTransferError):
                    raise PeerUnavailableError(
                        f"node {self._target!r} no longer knows the migration; it may have been restarted"
                    ) from error
                num_failures += 1
                # While the blocks are leased, the lease decides: the target may still reach this node.
                if num_failures >= _TRIES and not self._is_leased():
                    raise
                continue
            num_failures = 0
            if isinstance(outcome, PullOutcome):
                self._note(outcome)

    def _note(self, outcome: PullOutcome) -> None:
        status = outcome.status
        self.migration.note_progress(status)
        if status.phase is MigrationPhase.DONE:
            # Has an effect only for a copy whose acknowledgement was lost.
            self._source.cancel(CancelTransfer(self._message.pull_id, "the copy has arrived"))
            self._end(MigrationPhase.DONE, outcome.new_ids, None)
        elif status.phase in (MigrationPhase.FAILED, MigrationPhase.CANCELLED):
            raise_failure(CallFailed(status.error, status.error_message), self._target)

    def _break_off(self, error: Exception) -> None:
        """End the lease: from here on the target cannot complete the transfer, unless it already has."""
        reply = self._source.cancel(CancelTransfer(self._message.pull_id, str(error)[:200]))
        if reply.is_acknowledged and isinstance(error, PeerUnavailableError):
            # The target's report is missing, but it has acknowledged.
            outcome = self._source.find_outcome(self._message.pull_id)
            self._end(MigrationPhase.DONE, [] if outcome is None else list(outcome.new_ids), None)
            return
        is_wanted = isinstance(error, MigrationCancelledError)
        self._end(MigrationPhase.CANCELLED if is_wanted else MigrationPhase.FAILED, [], error)

    def _cancel(self) -> bool:
        reply = self._source.cancel(CancelTransfer(self._message.pull_id, "cancelled by the source"))
        if reply.is_acknowledged:
            return False
        error = MigrationCancelledError("the migration was cancelled; this node keeps the blocks")
        return self._end(MigrationPhase.CANCELLED, [], error)

    def _end(self, phase: MigrationPhase, new_ids: list[BlockId], error: Exception | None) -> bool:
        is_ended = self.migration.end(phase, new_ids, error)
        if is_ended:
            self._on_change(self.migration)
        return is_ended

    def _is_leased(self) -> bool:
        pull_id = self._message.pull_id
        return any(transfer.message.transfer_id == pull_id for transfer in self._source.list_prepared())
