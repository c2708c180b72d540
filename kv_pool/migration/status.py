"""`MigrationStatus`: how far a migration is; its phases."""

from __future__ import annotations

from enum import StrEnum

import msgspec


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


class MigrationStatus(msgspec.Struct, frozen=True):
    """One migration at one moment, as one of its two nodes sees it. Can be written as JSON.

    Attributes:
        migration_id: 32 hex digits, the same at both nodes.
        direction: `in` at the target, `out` at the source.
        peer: the other node's name.
        subject: in words.
        num_blocks: of the offer; 0 before there is one.
        num_present_blocks: those of them whose content the target had already, so that they are not read.
        num_done_blocks: at the target: read and verified, or present.
        num_bytes, num_descriptors: read so far, repeated reads included, and in how many pieces.
        started: seconds since the epoch, by this node's clock.
        elapsed_s: since then, waiting included; until it ended.
        error, error_message: of one that has failed or is in doubt, by the name of one of `kv_pool.errors`.
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
