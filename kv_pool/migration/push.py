"""`Push`: a migration started at its source, which asks the target to pull and polls for the outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from kv_pool.errors import KVPoolError, MigrationCancelledError, PeerUnavailableError, StaleTransferError
from kv_pool.ids import BlockId, NodeName
from kv_pool.migration.calls import raise_failure
from kv_pool.migration.messages import AskPull, CallFailed, Message, PullOutcome, PullSubject
from kv_pool.migration.migration import Migration, OutgoingMigration
from kv_pool.migration.source import SourceTransfers
from kv_pool.migration.status import MigrationPhase

_POLL_S = 0.05
_ADOPTION_S = 0.002
_TRIES = 3
_PROGRESS = ("num_blocks", "num_present_blocks", "num_done_blocks", "num_bytes", "num_descriptors")


class Push(OutgoingMigration):
    """A migration started at its source. One thread calls `run`.

    The transfer id is this migration's id, so this node's own `SourceTransfers` decides the fate of the
    blocks. The target only reports its progress and its error.

    Args:
        call: sends a message to the target; raises its error, or PeerUnavailableError.
        lease_s: of the node; the target is polled every 0.05 s, or every tenth of a lease if that is shorter.
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
        super().__init__(message.pull_id, target, message.subject, message.is_move, on_change, source)
        self._message = message
        self._call = call
        self._poll_s = min(_POLL_S, lease_s / 10)
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

    def _enter(self, phase: MigrationPhase, new_ids: list[BlockId], error: Exception | None = None) -> bool:
        has_entered = super()._enter(phase, new_ids, error)
        if phase is not MigrationPhase.READING:
            self._woken.set()
        return has_entered

    def _follow_acknowledgement(self, new_ids: list[BlockId]) -> None:
        """The migration ends later, when the target reports DONE."""
        self._enter(MigrationPhase.ACKNOWLEDGING, new_ids)

    def _follow_cancellation(self, reason: str) -> None:
        """The migration ends later, with the error that the target reports."""

    def _ask_until_started(self) -> None:
        for num_left in reversed(range(_TRIES)):
            try:
                self._call(self._message)
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
