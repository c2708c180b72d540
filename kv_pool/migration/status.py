"""`MigrationRecord`: what a node keeps of one migration; its status and phases."""

from __future__ import annotations

import time
from enum import StrEnum

import msgspec

from kv_pool.migration.subjects import Subject, describe_subject

_PROGRESS = ("num_blocks", "num_present_blocks", "num_done_blocks", "num_bytes", "num_descriptors")


class MigrationPhase(StrEnum):
    """Where a migration is in its life.

        target   WAITING -> PREPARING -> READING -> INSERTING -> ACKNOWLEDGING -> DONE
                    |           |           |           |              |     \\-> IN_DOUBT -> DONE or FAILED
                    +-----------+-----------+-----------+              +-> FAILED
                    |-> FAILED, or CANCELLED where somebody wanted it
        source   WAITING -> READING -> DONE, FAILED or CANCELLED       WAITING only where it has pushed

    IN_DOUBT is a move whose blocks have arrived and whose source has not answered whether it gave them up.
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
        """Will nothing change any more?"""
        return self in (MigrationPhase.DONE, MigrationPhase.FAILED, MigrationPhase.CANCELLED)


class MigrationStatus(msgspec.Struct):
    """One migration, as one of its two nodes sees it. Can be written as JSON.

    A node has one for each of its migrations and changes it; others get copies.

    Attributes:
        migration_id: 32 hex digits, the same at both nodes.
        direction: `in` at the target, `out` at the source.
        peer: the other node's name.
        subject: in words.
        started: seconds since the epoch, by this node's clock.
        num_blocks: of the offer; 0 before there is one.
        num_present_blocks: those of them whose content the target had already, so that they are not read.
        num_done_blocks: at the target: read and verified, or present.
        num_bytes, num_descriptors: read so far, repeated reads included, and in how many pieces.
        elapsed_s: since `started`, waiting included; until it ended.
        error, error_message: of one that has failed or is in doubt; the name of the error's class.
    """

    migration_id: str
    direction: str
    peer: str
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
    """All that a node keeps of one migration, and shows of it.

    Attributes:
        transfer_id: 16 bytes, `status.migration_id` in hex.
        status: what callers and the other node see.
        error: what it failed with, or is in doubt for.
        old_ids: of the blocks, at the source; known there once they are lent.
        new_ids: of the same blocks at the target; of one that is done.
    """

    def __init__(
        self,
        transfer_id: bytes,
        direction: str,
        peer: str,
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
        self.old_ids: list[int] = []
        self.new_ids: list[int] = []

    def set_error(self, error: Exception | None) -> None:
        """It has failed, or is in doubt; None where that is over."""
        self.error = error
        self.status.error = "" if error is None else type(error).__name__
        self.status.error_message = "" if error is None else str(error)

    def take_progress(self, told: MigrationStatus) -> None:
        """Count what the other node has counted."""
        for name in _PROGRESS:
            setattr(self.status, name, getattr(told, name))
