"""Blocks in a migration: `Selector` makes a `Selection` at the source; a `Reservation` at the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
from kv_pool.errors import (
    FrozenSequenceError,
    InvalidArgumentError,
    InvalidBlockError,
    StaleTransferError,
)
from kv_pool.ids import BlockHash, BlockHashWithGroupId, GroupId, RequestId, SequenceId
from kv_pool.migration.messages import BlocksSubject, OfferedBlock, PrefixSubject, SequenceSubject, Subject
from kv_pool.migration.sequences import SequenceOwner, Sequences

Rows = list[list[KVCacheBlock]]
"""The blocks of a sequence, one list for each KV cache group, null blocks included."""


@dataclass(frozen=True)
class Selection:
    """A snapshot of the blocks of a subject at the source.

    Attributes:
        blocks: distinct blocks with content, in the order of the sequence.
        offered: the description of the same blocks for the target.
        rows: the blocks that a move takes from each sequence; {} for a prefix.
        state: encoded `SubjectState`, read only by a site of the same kind. At most 16 MiB.
    """

    blocks: list[KVCacheBlock]
    offered: list[OfferedBlock]
    rows: dict[Any, Rows] = field(default_factory=dict)
    state: bytes = b""


class SubjectState(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The decoded form of `Selection.state`: the state that accompanies the blocks of an offer.

    No field has a default, so that a truncated state is not decoded.

    Attributes:
        sequence_ids: of a `BlocksSubject`, for each block the sequence that it joins at the target, or None;
            [] for other subjects.
        details: the result of the source's `Sequences.describe`; None if there is none.
        owner: the result of the source's `SequenceOwner.describe`.
    """

    sequence_ids: list[SequenceId | RequestId | None]
    details: Any
    owner: bytes


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
    joined: list[tuple[Any, Rows]] = field(default_factory=list)

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


class Selector:
    """Lookup of subjects in a pool. Changes nothing."""

    def __init__(self, sequences: Sequences, owner: SequenceOwner[Any]) -> None:
        self._sequences = sequences
        self._owner = owner
        self._pool = sequences.pool

    def select(self, subject: Subject, for_move: bool) -> Selection:
        """See `PoolSite.select`."""
        match subject:
            case SequenceSubject():
                return self._select_sequence(subject, for_move)
            case BlocksSubject():
                return self._select_blocks(subject, for_move)
        if for_move:
            raise InvalidArgumentError("a prefix cannot be moved, only copied: pass is_move=False")
        return self._select_prefix(subject)

    def _select_sequence(self, subject: SequenceSubject, for_move: bool) -> Selection:
        sequence_id = self._sequences.as_id(subject.sequence_id)
        if for_move:
            check_usable(self._sequences, [sequence_id])
        rows = self._sequences.list_rows(sequence_id)
        blocks = [block for row in rows for block in row if not block.is_null]
        if for_move:
            self._sequences.check_movable(blocks)
        state = SubjectState([], self._sequences.describe([sequence_id]), self._owner.describe(sequence_id))
        offered = self._offer_sequence(sequence_id, rows)
        return Selection(
            blocks,
            [offered[block] for block in blocks],
            {sequence_id: rows},
            msgspec.msgpack.encode(state),
        )

    def _select_blocks(self, subject: BlocksSubject, for_move: bool) -> Selection:
        blocks, holders = self._find_holders(subject, for_move)
        rows: dict[Any, Rows] = {}
        for block, holder in zip(blocks, holders, strict=True):
            if holder is not None:
                rows.setdefault(holder, [[]])[0].append(block)
        if for_move:
            check_usable(self._sequences, rows)
            self._sequences.check_movable(blocks)
        offered: dict[KVCacheBlock, OfferedBlock] = {}
        for sequence_id in rows:
            offered |= self._offer_sequence(sequence_id, self._sequences.list_rows(sequence_id))
        state = SubjectState(holders, self._sequences.describe(list(rows)) if rows else None, b"")
        return Selection(
            blocks,
            [offered[block] if block in offered else self._offer(block, None, ()) for block in blocks],
            rows,
            msgspec.msgpack.encode(state),
        )

    def _select_prefix(self, subject: PrefixSubject) -> Selection:
        hashes = [BlockHash(block_hash) for block_hash in subject.block_hashes]
        blocks: list[KVCacheBlock] = []
        offered: list[OfferedBlock] = []
        for block_size, hits in zip(
            self._sequences.block_sizes, self._sequences.find_prefix(hashes), strict=True
        ):
            stride = max(1, block_size // self._pool.hash_block_size)
            for position, block in enumerate(hits):
                if not block.is_null:
                    blocks.append(block)
                    parent = hashes[position * stride - 1] if position else None
                    offered.append(self._offer(block, parent, ()))
        return Selection(blocks, offered)

    def _find_blocks(self, subject: BlocksSubject) -> list[KVCacheBlock]:
        pool = self._pool
        if len(set(subject.block_ids)) != len(subject.block_ids):
            [(twice, _)] = Counter(subject.block_ids).most_common(1)
            raise InvalidBlockError(f"block {twice} is listed twice")
        if subject.generations and len(subject.generations) != len(subject.block_ids):
            raise InvalidArgumentError(
                f"{len(subject.generations)} generations for {len(subject.block_ids)} blocks; pass one for "
                "each block, or none"
            )
        blocks: list[KVCacheBlock] = []
        for position, block_id in enumerate(subject.block_ids):
            if not 0 < block_id < len(pool.blocks):
                raise InvalidBlockError(f"block {block_id} is not one of 1 to {len(pool.blocks) - 1}")
            block = pool.blocks[block_id]
            if subject.generations and subject.generations[position] != block.generation:
                raise StaleTransferError(
                    f"block {block_id} was reused since it was named: its generation was "
                    f"{subject.generations[position]} and is now {block.generation}"
                )
            blocks.append(block)
        return blocks

    def _find_holders(
        self, subject: BlocksSubject, for_move: bool
    ) -> tuple[list[KVCacheBlock], list[Any | None]]:
        """Return the blocks, and for each the sequence that it joins at the target, or None."""
        blocks = self._find_blocks(subject)
        holders = [self._sequences.find_holder(block) for block in blocks]
        for block, holder in zip(blocks, holders, strict=True):
            if holder is None and (for_move or block.block_hash is None):
                raise InvalidBlockError(
                    f"block {block.block_id} belongs to no sequence that it could join at the target, and "
                    + ("it is not cached" if block.block_hash is None else "so can only be copied, not moved")
                )
        return blocks, holders

    def _offer_sequence(self, sequence_id: Any, rows: Rows) -> dict[KVCacheBlock, OfferedBlock]:
        """Describe the blocks of a sequence for the target, each with its parent's hash and its tokens."""
        known = self._owner.list_token_ids(sequence_id)
        offered: dict[KVCacheBlock, OfferedBlock] = {}
        for block_size, row in zip(self._sequences.block_sizes, rows, strict=True):
            parent: BlockHash | None = None
            for position, block in enumerate(row):
                block_hash = None if block.block_hash is None else get_block_hash(block.block_hash)
                if not block.is_null:
                    token_ids = known[position * block_size : (position + 1) * block_size]
                    is_known = block_hash is not None and len(token_ids) == block_size
                    offered[block] = self._offer(block, parent, tuple(token_ids) if is_known else ())
                parent = block_hash
        return offered

    def _offer(
        self, block: KVCacheBlock, parent: BlockHash | None, token_ids: tuple[int, ...]
    ) -> OfferedBlock:
        keys = list_keys(self._pool, block)
        num_tokens = block.block_hash_num_tokens
        block_size = self._sequences.block_sizes[get_group_id(BlockHashWithGroupId(keys[0]))] if keys else 0
        is_first = (num_tokens or 0) <= block_size
        if parent is None and keys and block.parent:
            parent = BlockHash(block.parent[:-4])
        return OfferedBlock(
            block.block_id, block.generation, keys, num_tokens, None if is_first else parent, token_ids
        )


def check_usable(sequences: Sequences, sequence_ids: Iterable[Any]) -> None:
    """Raise FrozenSequenceError if one of these sequences is in a migration."""
    for sequence_id in sequence_ids:
        why = sequences.frozen.get(sequence_id)
        if why is not None:
            raise FrozenSequenceError(
                f"sequence {sequence_id!r} is frozen: {why}; wait for the migration or cancel it"
            )
