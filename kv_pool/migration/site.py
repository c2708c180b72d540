"""Blocks in a migration: `OfferedBlock`, `Selection` at the source, `Reservation` at the target; keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.core.caching import add_key
from kv_pool.core.extra_keys import KnownTokens
from kv_pool.core.holds import Hold
from kv_pool.core.kv_events import BlockStored
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.core.stored_events import make_stored
from kv_pool.ids import BlockHash, BlockHashWithGroupId, BlockId, GroupId, RequestId, SequenceId
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


class SubjectState(msgspec.Struct, array_like=True):
    """The decoded form of `Selection.state`: the state that accompanies the blocks of an offer.

    Attributes:
        sequence_ids: of a `BlocksSubject`, for each block the sequence that it joins at the target, or None;
            [] for other subjects.
        details: the result of the source's `Sequences.describe`; None if there is none.
        owner: the result of the source's `SequenceOwner.describe`.
    """

    sequence_ids: list[SequenceId | RequestId | None] = []
    details: Any = None
    owner: bytes = b""


@dataclass(eq=False)
class Reservation:
    """A reservation at the target: one block per offered block, in order, with a reference on each.

    Attributes:
        missing: positions whose bytes must be read. The other blocks already have the content.
        hold: keeps the blocks in place until `adopt` or `release_reservation`; None until it is open.
        sequence_ids: sequences that are frozen here until then.
        joined: the sequences that have received the blocks, with their rows, until their owner is notified.
    """

    subject: Subject
    offered: Sequence[OfferedBlock]
    blocks: list[KVCacheBlock]
    missing: list[int]
    hold: Hold | None
    sequence_ids: tuple[Any, ...]
    state: SubjectState
    joined: list[tuple[Any, list[list[KVCacheBlock]]]] = field(default_factory=list)

    @property
    def is_ended(self) -> bool:
        """Whether the references were passed on or dropped."""
        return self.get_hold().is_released

    def get_hold(self) -> Hold:
        """Return the hold, which is open or has ended."""
        assert self.hold is not None
        return self.hold


def insert_keys(
    pool: BlockPoolCore,
    block: KVCacheBlock,
    offered: OfferedBlock,
    find_block_size: Callable[[GroupId], int],
) -> None:
    """Register a received block under its source's cache keys.

    Publish one `BlockStored` for each key and notify the lower tiers. The caller has set `is_changing`.

    Args:
        block: in use, with the content of the source's block.
        find_block_size: returns the tokens per block of a KV cache group.

    The events carry the tokens if the source knows them, and no tokens otherwise.
    """

    def make_event(key: BlockHashWithGroupId, make: Any = None) -> Any:
        parent = None if offered.parent is None else BlockHash(offered.parent)
        group_id = get_group_id(key)
        known = KnownTokens([], list(offered.token_ids))
        return make_stored(
            pool, known, [get_block_hash(key)], parent, 0, find_block_size(group_id), group_id, make
        )

    keys = [BlockHashWithGroupId(key) for key in offered.keys]
    before: bytes | None = None
    if keys and offered.parent is not None:
        before = offered.parent + keys[0][-4:]
    elif keys and 0 < (offered.num_tokens or 0) <= find_block_size(get_group_id(keys[0])):
        before = b""
    pool.origins.note_copy(block, None)
    for key in keys:
        add_key(pool, key, block, offered.num_tokens, before)
        if pool.enable_kv_cache_events:
            pool.kv_event_queue.append(make_event(key))
    if keys and pool.lower_tiers is not None:
        event = make_event(keys[0], BlockStored) if pool.enable_kv_cache_events else None
        pool.lower_tiers.on_block_arrived(block, find_block_size(get_group_id(keys[0])), event)


def list_keys(pool: BlockPoolCore, block: KVCacheBlock) -> tuple[bytes, ...]:
    """Return all keys of a block, the primary one first; () if the block is not cached."""
    if block.block_hash is None:
        return ()
    return (block.block_hash, *pool.cached_block_hashes_by_block.get(block.block_id, ()))
