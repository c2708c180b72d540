"""`Migration`: one migration at one of its two nodes."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from typing import ClassVar

from kv_pool.ids import BlockId, NodeName
from kv_pool.migration.messages import (
    MigrationPhase,
    MigrationStatus,
    PrepareTransfer,
    PullSubject,
    describe_subject,
)


class Migration(ABC):
    """A migration, returned by `Migrator`. Thread-safe.

    Attributes:
        transfer_id: 16 bytes, the same at both nodes; `migration_id` is its hex form, 32 digits.
        peer: the name of the other node.
        begun_s, ended_s: when it was made, and when its end was reported, by `time.monotonic()`; None before.
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
        self.begun_s = time.monotonic()
        self.ended_s: float | None = None
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

    def is_holding(self) -> bool:
        """Return True while the arrived blocks are held. False at the source."""
        return False

    def get_status(self) -> MigrationStatus:
        """Return a copy of the current status."""
        status = copy(self.status)
        ended_s = time.monotonic() if self.ended_s is None else self.ended_s
        status.elapsed_s = elapsed_s = ended_s - self.begun_s
        status.bytes_per_s = status.num_bytes / elapsed_s if elapsed_s > 0 else 0.0
        return status

    def wait(self, timeout_s: float | None = None) -> list[BlockId]:
        """Wait until the migration has ended.

        Args:
            timeout_s: None to wait without a limit. The wait also ends after one lease in doubt.
        Returns:
            The blocks' ids at the target, in the order of the subject.
        Raises:
            MigrationInDoubtError: the source has not confirmed that it released a move, or the target's pool
                has to be repaired; wait again later.
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
            if self.phase.is_ended and self.ended_s is None:
                self.ended_s = time.monotonic()
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
