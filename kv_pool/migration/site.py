"""Blocks in a migration: `OfferedBlock`, `Selection` at the source, `Reservation` at the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import Hold
from kv_pool.ids import BlockId, RequestId, SequenceId
from kv_pool.migration.subjects import Subject


class OfferedBlock(msgspec.Struct, frozen=True, array_like=True):
    """One block of an offer.

    Attributes:
        block_id, generation: at the source.
        keys: its cache keys there, hashes with their groups; () if the block is not cached.
        num_tokens: tokens from the start of the sequence that the first key covers; None if unknown.
        parent: the hash of the preceding block, for events; None for the first block or if unknown.
        token_ids: of this block; () if the source does not know them.
    """

    block_id: BlockId
    generation: int
    keys: tuple[bytes, ...] = ()
    num_tokens: int | None = None
    parent: bytes | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Selection:
    """A snapshot of the blocks of a subject at the source.

    Attributes:
        blocks: distinct blocks with content, in the order of the sequence.
        offered: the description of the same blocks for the target.
        state: encoded `SubjectState`, read only by a site of the same kind. At most 16 MiB.
    """

    blocks: list[KVCacheBlock]
    offered: list[OfferedBlock]
    state: bytes = b""


class SubjectState(msgspec.Struct, frozen=True, array_like=True):
    """The decoded form of `Selection.state`: the state that accompanies the blocks of an offer.

    Attributes:
        sequence_ids: of a `BlocksSubject`, for each block the sequence that it joins at the target, or None;
            [] for other subjects.
        details: the result of the source's `Sequences.describe`.
        owner: the result of the source's `SequenceOwner.describe`.
    """

    sequence_ids: list[SequenceId | RequestId | None] = []
    details: bytes = b""
    owner: bytes = b""


@dataclass(eq=False)
class Reservation:
    """A reservation at the target: one block per offered block, in order, with a reference on each.

    Attributes:
        missing: positions whose bytes must be read. The other blocks already have the content.
        hold: keeps the blocks in place until `adopt` or `release_reservation`; None until it is open.
        sequence_ids: sequences that are frozen here until then.
        arriving: the result of the target's `Sequences.read_details`.
        joined: the sequences that have received the blocks, with their rows, until their owner is notified.
    """

    subject: Subject
    offered: Sequence[OfferedBlock]
    blocks: list[KVCacheBlock]
    missing: list[int]
    hold: Hold | None
    sequence_ids: tuple[Any, ...]
    state: SubjectState
    arriving: Any
    joined: list[tuple[Any, list[list[KVCacheBlock]]]] = field(default_factory=list)

    @property
    def is_ended(self) -> bool:
        """Whether the references were passed on or dropped."""
        return self.get_hold().is_released

    def get_hold(self) -> Hold:
        """Return the hold, which is open or has ended."""
        assert self.hold is not None
        return self.hold
