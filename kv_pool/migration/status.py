"""`MigrationStatus`: the status of one migration at one of its nodes, and its phases."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kv_pool.ids import NodeName


class MigrationPhase(StrEnum):
    """The phase of a migration.

        target   WAITING -> PREPARING -> READING -> INSERTING -> ACKNOWLEDGING -> DONE
                    |           |           |           |              |     \\-> IN_DOUBT -> DONE or FAILED
                    +-----------+-----------+-----------+              +-> FAILED
                    |-> FAILED, or CANCELLED by a caller
        source   WAITING -> READING -> DONE, FAILED or CANCELLED       a pull is READING at once

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
