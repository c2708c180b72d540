"""The cached blocks of a pool in the order of eviction, as rows of arrays, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import msgspec
import numpy as np

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidTypeError
from kv_pool.ids import BlockHashWithGroupId

_ROWS_PER_RECORD = 16_384
UNKNOWN = -1
"""Tokens of a key of which nobody said how many it covers."""

_GROUP_BYTES = 4


class RowsRecord(msgspec.Struct, array_like=True):
    """Some blocks, one row each: little-endian arrays as bytes.

    Attributes:
        ids: uint32.
        num_tokens: int32, tokens that the primary key covers; -1 where that is not known.
        num_keys: uint32, of each block.
        key_lengths: uint32, of each key, block by block, the primary one first.
        keys: all of them, without anything between.
    """

    ids: bytes
    num_tokens: bytes
    num_keys: bytes
    key_lengths: bytes
    keys: bytes


class KeyCopies(msgspec.Struct, array_like=True):
    """A key that several blocks carry: which rows, the one that is found first in front."""

    key: BlockHashWithGroupId
    rows: list[int]


@dataclass
class CachedRows:
    """Cached blocks, the next to be evicted first.

    Attributes:
        ids: the ids that the blocks had.
        num_tokens: -1 for a block of which it is not known.
        keys: of each block, the primary one first.
    """

    ids: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    keys: list[list[BlockHashWithGroupId]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)


def collect_rows(pool: BlockPoolCore) -> CachedRows:
    """All blocks that are found by a key, in the order of eviction if those in use were freed now.

    First the free ones in the queue's order. Those in use count as used last, those that cover the most
    tokens first: a sequence's tail goes before its head.

    Raises:
        InvalidTypeError: a key that is not bytes, which an engine has put there by hand.
    Cost: O(number of blocks).
    """
    in_use = [block for block in pool.blocks if block.ref_cnt > 0 and block.block_hash is not None]
    in_use.sort(key=lambda block: -(block.block_hash_num_tokens or 0))
    rows = CachedRows()
    for block in pool.free_block_queue.get_all_free_blocks() + in_use:
        if block.block_hash is not None and block.pool is pool:
            _collect_row(pool, block, rows)
    return rows


def _collect_row(pool: BlockPoolCore, block: KVCacheBlock, rows: CachedRows) -> None:
    primary = block.block_hash
    keys = []
    for key in (primary, *pool.cached_block_hashes_by_block.get(block.block_id, ())):
        if not isinstance(key, bytes):
            raise InvalidTypeError(f"a key of block {block.block_id} is a {type(key).__name__}, not bytes")
        if pool.cached_block_hash_to_block.contain(BlockHashWithGroupId(key), block.block_id):
            keys.append(BlockHashWithGroupId(key))
    if keys:
        num_tokens = block.block_hash_num_tokens if keys[0] == primary else None
        rows.ids.append(block.block_id)
        rows.num_tokens.append(UNKNOWN if num_tokens is None else num_tokens)
        rows.keys.append(keys)


def encode_rows(rows: CachedRows) -> Iterator[bytes]:
    """The rows as records of bounded size."""
    for start in range(0, len(rows), _ROWS_PER_RECORD):
        some = slice(start, start + _ROWS_PER_RECORD)
        keys = [key for block_keys in rows.keys[some] for key in block_keys]
        yield msgspec.msgpack.encode(
            RowsRecord(
                np.array(rows.ids[some], "<u4").tobytes(),
                np.array(rows.num_tokens[some], "<i4").tobytes(),
                np.array([len(block_keys) for block_keys in rows.keys[some]], "<u4").tobytes(),
                np.array([len(key) for key in keys], "<u4").tobytes(),
                b"".join(keys),
            )
        )


def decode_rows(payload: bytes, rows: CachedRows) -> None:
    """Append a record's rows.

    Raises:
        ValueError: its columns do not fit together, or it is no such record.
    """
    record = msgspec.msgpack.decode(payload, type=RowsRecord)
    ids = np.frombuffer(record.ids, "<u4").tolist()
    num_tokens = np.frombuffer(record.num_tokens, "<i4").tolist()
    num_keys = np.frombuffer(record.num_keys, "<u4").tolist()
    ends = list(accumulate(np.frombuffer(record.key_lengths, "<u4").tolist(), initial=0))
    if not len(ids) == len(num_tokens) == len(num_keys) or sum(num_keys) != len(ends) - 1:
        raise ValueError("its columns have different lengths")
    if ends[-1] != len(record.keys) or 0 in num_keys:
        raise ValueError("its keys are not those that it counts")
    keys = [BlockHashWithGroupId(record.keys[start:end]) for start, end in pairwise(ends)]
    rows.ids += ids
    rows.num_tokens += num_tokens
    first = 0
    for count in num_keys:
        rows.keys.append(keys[first : first + count])
        first += count


def list_copies(pool: BlockPoolCore, rows: CachedRows) -> list[KeyCopies]:
    """The keys that several of the rows carry."""
    carriers = _find_carriers(rows)
    entries = pool.cached_block_hash_to_block.entries
    row_of = {block_id: row for row, block_id in enumerate(rows.ids)}
    return [
        KeyCopies(key, [row_of[block_id] for block_id in entries[key] if block_id in row_of])
        for key, places in carriers.items()
        if len(places) > 1
    ]


def check_rows(rows: CachedRows, copies: list[KeyCopies], num_blocks: int, num_cached: int) -> None:
    """Raise ValueError unless these are the rows of a pool of so many blocks, so many of them cached."""
    if len(rows) != num_cached:
        raise ValueError(f"it has {len(rows)} of {num_cached} blocks")
    if len(set(rows.ids)) != len(rows) or any(not 0 < block_id < num_blocks for block_id in rows.ids):
        raise ValueError(f"its blocks are no distinct ones of a pool of {num_blocks}")
    for row, keys in enumerate(rows.keys):
        if len(set(keys)) != len(keys) or any(len(key) < _GROUP_BYTES for key in keys):
            raise ValueError(f"block {rows.ids[row]} has keys that a block can not have")
    if min(rows.num_tokens, default=0) < UNKNOWN:
        raise ValueError("a key covers a negative number of tokens")
    told = {shared.key: sorted(shared.rows) for shared in copies}
    carriers = _find_carriers(rows)
    if len(told) != len(copies) or told != {
        key: places for key, places in carriers.items() if len(places) > 1
    }:
        raise ValueError("its keys are carried by other blocks than it says")


def _find_carriers(rows: CachedRows) -> dict[BlockHashWithGroupId, list[int]]:
    """Which rows carry each key, ascending."""
    carriers: dict[BlockHashWithGroupId, list[int]] = {}
    for row, keys in enumerate(rows.keys):
        for key in keys:
            carriers.setdefault(key, []).append(row)
    return carriers
