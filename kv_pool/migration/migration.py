"""`Migration`: one migration of a node, running or ended; what callers wait for, ask and cancel."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy

from kv_pool.errors import MigrationCancelledError
from kv_pool.migration.status import MigrationPhase, MigrationRecord, MigrationStatus
from kv_pool.migration.target import Pull


class Migration(ABC):
    """From `Migrator`. All of it may be called by any thread.

    Attributes:
        migration_id: 32 hex digits, the same at both nodes.
        peer: the other node.
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
        """Where it is."""
        return self.record.status.phase

    @property
    def error(self) -> Exception | None:
        """What it failed with, or is in doubt for."""
        return self.record.error

    @property
    def new_ids(self) -> list[int]:
        """The blocks' ids at the target, in the order of the subject; of one that is done."""
        return self.record.new_ids

    @property
    def old_ids(self) -> list[int]:
        """The blocks' ids at the source, in the same order; at the source, once they are lent."""
        return self.record.old_ids

    @abstractmethod
    def cancel(self) -> bool:
        """Give it up: the source keeps what it has, the target nothing. False: it is too late."""

    @abstractmethod
    def release(self) -> None:
        """What `fetch(..., hold_s=...)` has brought need not be held any longer: it is used, or not wanted.

        Twice is harmless, and so it is when the time is over. Before it has arrived: it will not be held.
        """

    def get_status(self) -> MigrationStatus:
        """How far it is, now."""
        status = copy(self.record.status)
        elapsed_s = time.monotonic() - self._begun_s if self._elapsed_s is None else self._elapsed_s
        status.elapsed_s = elapsed_s
        status.bytes_per_s = status.num_bytes / elapsed_s if elapsed_s > 0 else 0.0
        return status

    def wait(self, timeout_s: float | None = None) -> list[int]:
        """Wait for the end.

        Args:
            timeout_s: None for as long as it takes; but one that is in doubt for longer than a lease is not
                waited for.
        Returns:
            The blocks' ids at the target, in the order of the subject.
        Raises:
            MigrationInDoubtError: the source has not answered whether it gave a move up; ask again later.
            TimeoutError: it goes on.
            Whatever it failed with.
        """
        with self._changed:
            self._changed.wait_for(self._is_not_waited_for, timeout_s)
            phase, error = self.phase, self.error
        if phase is MigrationPhase.DONE:
            return list(self.new_ids)
        if error is not None and (phase.is_ended or phase is MigrationPhase.IN_DOUBT):
            raise error
        raise TimeoutError(f"migration {self.migration_id} is {phase.value} after {timeout_s} s")

    def wait_for_end(self, timeout_s: float) -> bool:
        """Has it ended by then, well or not?"""
        with self._changed:
            return self._changed.wait_for(lambda: self.phase.is_ended, timeout_s)

    def note_change(self) -> None:
        """Wake whoever waits. Called by the migrator."""
        with self._changed:
            if self.phase.is_ended and self._elapsed_s is None:
                self._elapsed_s = time.monotonic() - self._begun_s
            self._changed.notify_all()

    def _is_not_waited_for(self) -> bool:
        return self.phase.is_ended


class IncomingMigration(Migration):
    """At the target."""

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
        """Of one in doubt: the source is gone for good, or was told to forget the subject. It is ours then.

        Say so only if you know: a source that goes on with the subject would share it with this node. False,
        with nothing changed, if it is not in doubt.
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
    """At the source: what a target has asked for, or was asked to pull.

    Args:
        cancel: takes the blocks back; False if the target has them.
        is_push: this node has asked for it, and hears from the target how it goes.

    Attributes:
        woken: set when it has ended, or is acknowledged.
    """

    def __init__(self, record: MigrationRecord, cancel: Callable[[], bool], is_push: bool) -> None:
        super().__init__(record)
        self.is_push = is_push
        self._cancel = cancel
        self.woken = threading.Event()

    def cancel(self) -> bool:
        return not self.phase.is_ended and self._cancel()

    def release(self) -> None:
        """Nothing is held here: blocks that were lent are the source's own."""

    def note_lent(self, block_ids: list[int]) -> None:
        """The target has asked for it."""
        with self._changed:
            if not self.phase.is_ended:
                self.record.status.phase = MigrationPhase.READING
                self.record.status.num_blocks = len(block_ids)
                self.record.old_ids = block_ids

    def note_progress(self, told: MigrationStatus) -> None:
        """As the target says."""
        with self._changed:
            if not self.phase.is_ended:
                self.record.take_progress(told)

    def note_acknowledged(self, new_ids: list[int]) -> None:
        """The target has them, and takes them over next; where it was asked to pull, it will say so."""
        if not self.is_push:
            self.end(MigrationPhase.DONE, new_ids, None)
            return
        with self._changed:
            if not self.phase.is_ended:
                self.record.status.phase, self.record.new_ids = MigrationPhase.ACKNOWLEDGING, new_ids
        self.woken.set()

    def note_cancelled(self, reason: str) -> None:
        """The blocks are back, unacknowledged; where the target was asked to pull, it will say why."""
        if not self.is_push:
            why = f": {reason}" if reason else ""
            error = MigrationCancelledError(f"the blocks were taken back{why}")
            self.end(MigrationPhase.CANCELLED, [], error)

    def end(self, phase: MigrationPhase, new_ids: list[int], error: Exception | None) -> bool:
        """It is over. False, with nothing changed, if it was before."""
        with self._changed:
            if self.phase.is_ended:
                return False
            self.record.set_error(error)
            self.record.status.phase, self.record.new_ids = phase, new_ids
        self.woken.set()
        return True
