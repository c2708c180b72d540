"""Converts a pool's cached blocks, in eviction order, to rows of arrays and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import msgspec
import numpy as np

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidTypeError
from kv_pool.ids import BlockHashWithGroupId, BlockId

_ROWS_PER_RECORD = 16_384
UNKNOWN = -1
"""Token count of a key for which the count is not known."""

_GROUP_BYTES = 4


class RowsRecord(msgspec.Struct, array_like=True):
    """A batch of blocks, one row each, as little-endian arrays in bytes.

    Attributes:
        ids: uint32, block ids.
        num_tokens: int32, number of tokens that the primary key covers; -1 if not known.
        num_keys: uint32, number of keys of each block.
        key_lengths: uint32, length of each key in bytes, block by block, the primary key first.
        keys: all keys, concatenated.
        parent_lengths: int32, length of each block's `KVCacheBlock.parent` in bytes, -1 if it is not known;
            empty in dumps of older versions.
        parents: all of these, concatenated.
    """

    ids: bytes
    num_tokens: bytes
    num_keys: bytes
    key_lengths: bytes
    keys: bytes
    parent_lengths: bytes = b""
    parents: bytes = b""


KeyCopies = tuple[BlockHashWithGroupId, list[int]]
"""A key that several blocks carry, with their rows; a look-up returns the first row's block."""


@dataclass
class CachedRows:
    """Cached blocks, the next to be evicted first.

    Attributes:
        ids: the blocks' ids in the dumped pool.
        num_tokens: number of tokens that each primary key covers; -1 if not known.
        keys: the keys of each block, the primary one first.
        parents: `KVCacheBlock.parent` of each block.
        copies: the keys that several blocks carry.
    """

    ids: list[BlockId] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    keys: list[list[BlockHashWithGroupId]] = field(default_factory=list)
    parents: list[bytes | None] = field(default_factory=list)
    copies: list[KeyCopies] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)


def collect_rows(pool: BlockPoolCore) -> CachedRows:
    """Return all blocks that can be found by a key, in eviction order, as if blocks in use were freed now.

    Free blocks come first, in the queue's order; then the blocks in use, those that cover the most tokens
    first, so that a sequence's tail is evicted before its head.

    Raises:
        InvalidTypeError: a key is not bytes; the engine has set it by hand.
    Cost: O(number of blocks).
    """
    in_use = [block for block in pool.blocks if block.ref_cnt > 0 and block.block_hash is not None]
    in_use.sort(key=lambda block: -(block.block_hash_num_tokens or 0))
    rows = CachedRows()
    for block in pool.free_block_queue.get_all_free_blocks() + in_use:
        if block.block_hash is not None and block.pool is pool:
            _collect_row(pool, block, rows)
    entries = pool.cached_block_hash_to_block.entries
    row_of = {block_id: row for row, block_id in enumerate(rows.ids)}
    for key in _find_shared(rows):
        rows.copies.append((key, [row_of[block_id] for block_id in entries[key] if block_id in row_of]))
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
        rows.parents.append(block.parent if keys[0] == primary else None)


def encode_rows(rows: CachedRows) -> Iterator[bytes]:
    """Yield the rows as encoded records of bounded size."""
    for start in range(0, len(rows), _ROWS_PER_RECORD):
        some = slice(start, start + _ROWS_PER_RECORD)
        keys = [key for block_keys in rows.keys[some] for key in block_keys]
        parents = rows.parents[some]
        yield msgspec.msgpack.encode(
            RowsRecord(
                np.array(rows.ids[some], "<u4").tobytes(),
                np.array(rows.num_tokens[some], "<i4").tobytes(),
                np.array([len(block_keys) for block_keys in rows.keys[some]], "<u4").tobytes(),
                np.array([len(key) for key in keys], "<u4").tobytes(),
                b"".join(keys),
                np.array([-1 if one is None else len(one) for one in parents], "<i4").tobytes(),
                b"".join(one or b"" for one in parents),
            )
        )


def decode_rows(payload: bytes, rows: CachedRows) -> None:
    """Append a record's rows to `rows`.

    Raises:
        ValueError: the columns are inconsistent, or the payload is not such a record.
    """
    record = msgspec.msgpack.decode(payload, type=RowsRecord)
    ids = np.frombuffer(record.ids, "<u4").tolist()
    num_tokens = np.frombuffer(record.num_tokens, "<i4").tolist()
    num_keys = np.frombuffer(record.num_keys, "<u4").tolist()
    ends = list(accumulate(np.frombuffer(record.key_lengths, "<u4").tolist(), initial=0))
    if not len(ids) == len(num_tokens) == len(num_keys) or sum(num_keys) != len(ends) - 1:
        raise ValueError("its columns have different lengths")
    if ends[-1] != len(record.keys) or 0 in num_keys:
        raise ValueError("its keys do not match its key counts")
    keys = [BlockHashWithGroupId(record.keys[start:end]) for start, end in pairwise(ends)]
    lengths = np.frombuffer(record.parent_lengths, "<i4").tolist() or [-1] * len(ids)
    ends = list(accumulate((max(0, length) for length in lengths), initial=0))
    if len(lengths) != len(ids) or ends[-1] != len(record.parents):
        raise ValueError("its parents do not match its blocks")
    rows.parents += [
        None if length < 0 else record.parents[end - length : end]
        for length, end in zip(lengths, ends[1:], strict=True)
    ]
    rows.ids += ids
    rows.num_tokens += num_tokens
    first = 0
    for count in num_keys:
        rows.keys.append(keys[first : first + count])
        first += count


def check_rows(rows: CachedRows, num_blocks: int, num_cached: int) -> None:
    """Raise ValueError unless these rows fit a pool of `num_blocks` blocks, `num_cached` of them cached."""
    if len(rows) != num_cached:
        raise ValueError(f"it has {len(rows)} of {num_cached} blocks")
    if len(set(rows.ids)) != len(rows) or any(not 0 < block_id < num_blocks for block_id in rows.ids):
        raise ValueError(f"its block ids are not distinct ids of a pool of {num_blocks} blocks")
    for row, keys in enumerate(rows.keys):
        if len(set(keys)) != len(keys) or any(len(key) < _GROUP_BYTES for key in keys):
            raise ValueError(f"block {rows.ids[row]} has invalid or duplicate keys")
    if min(rows.num_tokens, default=0) < UNKNOWN:
        raise ValueError("a key covers a negative number of tokens")
    listed = {key: sorted(places) for key, places in rows.copies}
    if len(listed) != len(rows.copies) or listed != _find_shared(rows):
        raise ValueError("its list of shared keys does not match the keys of its blocks")


def _find_shared(rows: CachedRows) -> dict[BlockHashWithGroupId, list[int]]:
    """Return the keys that several rows carry, with these rows, ascending."""
    carriers: dict[BlockHashWithGroupId, list[int]] = {}
    for row, keys in enumerate(rows.keys):
        for key in keys:
            carriers.setdefault(key, []).append(row)
    return {key: places for key, places in carriers.items() if len(places) > 1}
