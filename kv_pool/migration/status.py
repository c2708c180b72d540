"""`MigrationRecord`: a node's record of one migration; its status and phases."""

from __future__ import annotations

import time
from enum import StrEnum

import msgspec

from kv_pool.ids import BlockId, NodeName, TransferId
from kv_pool.migration.subjects import Subject, describe_subject

_PROGRESS = ("num_blocks", "num_present_blocks", "num_done_blocks", "num_bytes", "num_descriptors")


class MigrationPhase(StrEnum):
    """The phase of a migration.

        target   WAITING -> PREPARING -> READING -> INSERTING -> ACKNOWLEDGING -> DONE
                    |           |           |           |              |     \\-> IN_DOUBT -> DONE or FAILED
                    +-----------+-----------+-----------+              +-> FAILED
                    |-> FAILED, or CANCELLED by a caller
        source   WAITING -> READING -> DONE, FAILED or CANCELLED       WAITING only for a push

    IN_DOUBT is a move whose blocks have arrived and whose source has not confirmed that it released them.
    """

    WAITING = "waiting"
    PREPARING = "preparing"
    READING = "reading"
    INSERTING = "inserting"
    ACKNOWLEDGING = "acknowledging"
    IN_DOUBT = "in doubt"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_ended(self) -> bool:
        """True in a final phase: DONE, FAILED or CANCELLED."""
        return self in (MigrationPhase.DONE, MigrationPhase.FAILED, MigrationPhase.CANCELLED)


class MigrationStatus(msgspec.Struct):
    """The status of one migration, as seen by one of its two nodes. JSON-serializable.

    The node updates its own instance; callers get copies.

    Attributes:
        migration_id: 32 hex digits, the same at both nodes.
        direction: `in` at the target, `out` at the source.
        peer: the other node's name.
        subject: a description for people.
        started: Unix time in seconds, by this node's clock.
        num_blocks: of the offer; 0 before the offer.
        num_present_blocks: of `num_blocks`, those whose content the target already had; they are not read.
        num_done_blocks: blocks that the target has: read and verified, or present before.
        num_bytes, num_descriptors: bytes read so far, repeated reads included, and the number of pieces.
        elapsed_s: from `started` until now or the end, waiting included.
        error, error_message: class name and message of the error that it failed with or is in doubt for.
    """

    migration_id: str
    direction: str
    peer: NodeName
    subject: str
    is_move: bool
    phase: MigrationPhase
    started: float
    num_blocks: int = 0
    num_present_blocks: int = 0
    num_done_blocks: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    bytes_per_s: float = 0.0
    elapsed_s: float = 0.0
    error: str = ""
    error_message: str = ""


class MigrationRecord:
    """A node's record of one migration.

    Attributes:
        transfer_id: 16 bytes; `status.migration_id` is its hex form.
        status: visible to callers and to the other node.
        error: the error that it failed with or is in doubt for.
        old_ids: the blocks' ids at the source; known there once they are leased.
        new_ids: the same blocks' ids at the target; known once the migration is done.
    """

    def __init__(
        self,
        transfer_id: TransferId,
        direction: str,
        peer: NodeName,
        subject: Subject,
        is_move: bool,
        phase: MigrationPhase = MigrationPhase.WAITING,
    ) -> None:
        self.transfer_id = transfer_id
        self.subject = subject
        self.is_move = is_move
        described = describe_subject(subject)
        self.status = MigrationStatus(
            transfer_id.hex(), direction, peer, described, is_move, phase, started=time.time()
        )
        self.error: Exception | None = None
        self.old_ids: list[BlockId] = []
        self.new_ids: list[BlockId] = []

    def set_error(self, error: Exception | None) -> None:
        """Set the error, also in the status; None clears it."""
        self.error = error
        self.status.error = "" if error is None else type(error).__name__
        self.status.error_message = "" if error is None else str(error)

    def take_progress(self, reported: MigrationStatus) -> None:
        """Copy the counts of the other node's status."""
        for name in _PROGRESS:
            setattr(self.status, name, getattr(reported, name))
