"""What migration says of blocks: `OfferedBlock`, `Selection` at the source, `Room` at the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.holds import Hold
from kv_pool.migration.subjects import Subject


class OfferedBlock(msgspec.Struct, frozen=True, array_like=True):
    """One block of an offer.

    Attributes:
        block_id, generation: at the source.
        keys: hashes with their groups, by which it is found there; () for a block that is not cached.
        num_tokens: from the start of the sequence that the first key covers; None if that is not known.
        parent: the hash of the block before it, for events; None for the first, or if that is not known.
        token_ids: of this block, where the source knows them; () otherwise.
    """

    block_id: int
    generation: int
    keys: tuple[bytes, ...] = ()
    num_tokens: int | None = None
    parent: bytes | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Selection:
    """The blocks of a subject, at the source, at this moment.

    Attributes:
        blocks: distinct blocks with content, in the order of the sequence.
        offered: the same, as the target is told of them.
        state: what else the target needs to go on; only a site of the same kind reads it. At most 16 MiB.
    """

    blocks: list[KVCacheBlock]
    offered: list[OfferedBlock]
    state: bytes = b""


class SubjectState(msgspec.Struct, frozen=True, array_like=True):
    """What goes along with the blocks of an offer: `Selection.state`, decoded.

    Attributes:
        sequence_ids: of a `BlocksSubject`, for each block the sequence that it joins at the target, None for
            none; [] of other subjects.
        details: what the source's `Sequences` say of these sequences.
        owner: what the engine says of the sequence.
    """

    sequence_ids: list[int | str | None] = []
    details: bytes = b""
    owner: bytes = b""


@dataclass(frozen=True, eq=False)
class Room:
    """Blocks at the target for those of an offer, one each, in order; the room has a reference on each.

    Attributes:
        missing: positions whose bytes have to be read. The content of the others is here already.
        hold: keeps the blocks at their ids until `adopt` or `leave`.
        sequence_ids: sequences that cannot be used here until then.
        arriving: the state of the offer, as the target's `Sequences` understand it.
    """

    subject: Subject
    offered: Sequence[OfferedBlock]
    blocks: list[KVCacheBlock]
    missing: list[int]
    hold: Hold
    sequence_ids: tuple[Any, ...]
    state: SubjectState
    arriving: Any
