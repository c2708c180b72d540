"""`OutgoingMigration`: a migration at its source; `Push`: one that its source has started."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from kv_pool.errors import KVPoolError, MigrationCancelledError, PeerUnavailableError, StaleTransferError
from kv_pool.ids import BlockId, NodeName
from kv_pool.migration import messages
from kv_pool.migration.messages import MigrationPhase
from kv_pool.migration.migration import Migration
from kv_pool.migration.source import SourceTransfers, Transfer, TransferState
from kv_pool.migration.verified_reads import TRIES, PeerCalls, PullSettings

_POLL_S = 0.05
_ADOPTION_S = 0.002
_PROGRESS = ("num_blocks", "num_present_blocks", "num_done_blocks", "num_bytes", "num_descriptors")


class OutgoingMigration(Migration):
    """A migration at its source, requested by the target: it follows the transfer of the same id.

    Args:
        source: the transfers of this node.
    """

    direction: ClassVar[str] = "out"

    def __init__(
        self,
        wanted: messages.PullSubject | messages.PrepareTransfer,
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
        return not self._source.cancel(messages.CancelTransfer(self.transfer_id, reason)).is_acknowledged


class Push(OutgoingMigration):
    """A migration started at its source. One thread calls `run`.

    The transfer id is this migration's id, so this node's own `SourceTransfers` decides the fate of the
    blocks. The target only reports its progress and its error.

    The target is polled every 0.05 s, or every tenth of a lease if that is shorter.
    """

    def __init__(
        self,
        settings: PullSettings,
        wanted: messages.PullSubject,
        target: NodeName,
        source: SourceTransfers,
    ) -> None:
        super().__init__(wanted, target, settings.on_change, source)
        self._calls = PeerCalls(settings, target)
        self._wanted = wanted
        self._poll_s = min(_POLL_S, settings.lease_s / 10)

    def run(self) -> None:
        try:
            self._calls.repeat(self._wanted, messages.Acknowledged)
            self._ask_until_ended()
        except Exception as error:
            self._break_off(error)
        if self.phase is MigrationPhase.CANCELLED:
            # The target would notice by itself, but only after further reads.
            with suppress(KVPoolError):
                self._calls.call(messages.AskPull(self.transfer_id, cancel=True), messages.PullOutcome)

    def cancel(self) -> bool:
        error = MigrationCancelledError("the migration was cancelled; this node keeps the blocks")
        if not super().cancel():
            return False
        self._calls.stop(error)
        return self._enter(MigrationPhase.CANCELLED, [], error)

    def follow(self, transfer: Transfer) -> None:
        """Record the state of the transfer; one that the target has ended ends the migration, too."""
        outcome = transfer.outcome
        if outcome is None or outcome.state is TransferState.EXPIRED:
            super().follow(transfer)
        elif outcome.state is TransferState.ACKNOWLEDGED:
            self._enter(MigrationPhase.ACKNOWLEDGING, list(outcome.new_ids))

    def _ask_until_ended(self) -> None:
        """Poll the target until it reports the end, or until it stops answering after its acknowledgement."""
        num_failures = 0
        while True:
            with self._changed:
                if not self.phase.is_ended:
                    is_acknowledged = self.phase is MigrationPhase.ACKNOWLEDGING
                    self._changed.wait(_ADOPTION_S if is_acknowledged else self._poll_s)
            if self.phase.is_ended:
                return
            is_acknowledged = self.phase is MigrationPhase.ACKNOWLEDGING
            try:
                outcome = self._calls.call(messages.AskPull(self.transfer_id), messages.PullOutcome)
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
                if num_failures >= TRIES and not self._source.is_prepared(self.transfer_id):
                    raise
                continue
            num_failures = 0
            self._note(outcome)

    def _note(self, outcome: messages.PullOutcome) -> None:
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
            messages.raise_failure(messages.CallFailed(status.error, status.error_message), self.peer)

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
