"""The file of a pool dump: records with checksums, which detect damage anywhere in the file.

| magic, version | frame, payload | frame, payload | ... | frame, payload of END |

frame = kind, number of the record in the file, payload bytes, xxh3_64 of the payload, xxh3_64 of all these

The payload of a ROWS record has a pool's cached blocks, in eviction order, as arrays: see `RowsRecord`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from io import BufferedReader
from itertools import accumulate, islice, pairwise
from pathlib import Path
from struct import Struct
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
import xxhash

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.kv_events import AllBlocksCleared, BlockStored
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidTypeError, PoolDumpError, TierError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.ids import BlockHashWithGroupId, BlockId
from kv_pool.regular_files import open_regular
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.host_tier import RowBuffer

MAGIC = b"kv_pool\x00"
VERSION = 2
"""2: the layout may name model and weights. Dumps of version 1 name neither, and are read without."""
_READ_VERSIONS = (1, VERSION)
BATCH_BYTES = 32 * 1024 * 1024
"""Size of the host buffer between storage and file."""

_START = Struct("<8sQ")
_FRAME = Struct("<IIQQ")
_CHECKSUM = Struct("<Q")
_EVENTS = msgspec.msgpack.Decoder(list[AllBlocksCleared | BlockStored])
_Payload = bytes | bytearray | memoryview
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Size = Annotated[int, msgspec.Meta(ge=1)]


class RecordKind(IntEnum):
    """The kinds of records, in the order in which they appear in a file."""

    HEADER = 1
    ROWS = 2
    COPIES = 3
    EVENTS = 4
    DATA = 5
    END = 6


def write_records(file: BinaryIO, records: Iterable[tuple[RecordKind, _Payload]]) -> None:
    """Write a dump with these records. A payload may be overwritten once the next record is requested."""
    file.write(_START.pack(MAGIC, VERSION))
    for number, (kind, payload) in enumerate(records):
        checksum = xxhash.xxh3_64_intdigest(payload)
        frame = _FRAME.pack(kind, number, memoryview(payload).nbytes, checksum)
        file.write(frame + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(frame)))
        file.write(payload)


@contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a new file that atomically replaces `path` on exit, once all of it is on the disk.

    Only its owner can read it. If the block raises, `path` is unchanged.

    Raises:
        TierError: the folder is missing or not writable, or the disk is full. `path` is unchanged.
    """
    whole = Path(path)
    temporary = whole.with_name(f".{whole.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, whole)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(whole.parent)
    except OSError as error:
        raise TierError(f"nothing was dumped to {whole}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries are on the disk, where the operating system supports it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class PoolDumpHeader(msgspec.Struct, frozen=True):
    """The header of a pool dump.

    Attributes:
        layout: the meaning of bytes and hashes; None if not given to `dump_pool`.
        hash_block_size, num_hash_lookahead_tokens, medium, num_blocks: of the pool; `num_blocks` includes the
            null block.
        num_cached: number of blocks with keys.
        num_evictions: the pool's eviction count.
        block_bytes: size of a block; 0 if the dump has no bytes.
        next_sequence: sequence number of the next batch of events; None if no stream state was dumped.
        random_seed: names the random seed of the process, if its hashes may depend on it: it has made a
            `BlockHasher` without a seed, and the layout does not say which hasher was used.
    """

    layout: BlockLayout | None
    hash_block_size: _Size
    num_hash_lookahead_tokens: _Count
    medium: str
    num_blocks: _Size
    num_cached: _Count
    num_evictions: _Count
    block_bytes: _Count
    next_sequence: _Count | None
    random_seed: str = ""


@contextmanager
def open_dump(path: str | os.PathLike[str]) -> Iterator[DumpReader]:
    """Open a dump and read its header. Raises PoolDumpError if that fails."""
    name = os.fspath(path)
    try:
        with open(open_regular(path), "rb") as file:
            yield DumpReader(file, name)
    except OSError as error:  # only reading raises it; a storage raises CopyFailedError
        raise PoolDumpError(f"no dumped pool can be read from {name}: {error.strerror}") from error


class DumpReader:
    """A sequential reader: the header, then `read_blocks`, `read_bytes`, `check_end`, in this order.

    Raises:
        PoolDumpError: from any call, if the file is not a pool dump, has another version, or is truncated or
            damaged.
    """

    def __init__(self, file: BufferedReader, path: str) -> None:
        self._file = file
        self._path = path
        self._num_left = os.fstat(file.fileno()).st_size
        magic, version = _START.unpack(self._read(_START.size))
        if magic != MAGIC:
            raise PoolDumpError(f"{path} is not a pool dump: it does not begin like one")
        if version not in _READ_VERSIONS:
            known = ", ".join(map(str, _READ_VERSIONS))
            raise PoolDumpError(f"{path} has format version {version}; supported versions are {known}")
        # The frame of the next record, whose payload follows.
        self._number = -1
        self._kind = RecordKind.HEADER
        self._num_bytes = self._checksum = 0
        self._read_frame()
        if self._kind != RecordKind.HEADER:
            raise self._make_error("it does not begin with a header")
        try:
            self.header = msgspec.msgpack.decode(self._take_payload(), type=PoolDumpHeader)
        except UNDECODABLE as error:
            raise self._make_error(str(error)) from error

    def read_blocks(self) -> tuple[CachedRows, list[BlockStored]]:
        """Return the blocks, and the events published about them: everything except the blocks' bytes."""
        rows = CachedRows()
        stores: list[BlockStored] = []
        try:
            while self._kind == RecordKind.ROWS:
                decode_rows(self._take_payload(), rows)
            while self._kind == RecordKind.COPIES:
                rows.copies += msgspec.msgpack.decode(self._take_payload(), type=list[KeyCopies])
            check_rows(rows, self.header.num_blocks, self.header.num_cached)
            while self._kind == RecordKind.EVENTS:
                events = _EVENTS.decode(self._take_payload())
                stores += [event for event in events if isinstance(event, BlockStored)]
        except PoolDumpError:
            raise
        except UNDECODABLE as error:
            raise self._make_error(str(error)) from error
        return rows, stores

    def read_bytes(self, storage: BlockStorage, targets: Sequence[BlockId | None]) -> None:
        """Copy the bytes of each row to its target block in the storage; skip rows with target None."""
        buffer = RowBuffer(storage.block_bytes, storage.block_format, BATCH_BYTES)
        for start in range(0, len(targets), buffer.num_blocks):
            moves = []
            for place, target in enumerate(targets[start : start + buffer.num_blocks]):
                if self._kind != RecordKind.DATA:
                    raise self._make_error("bytes of blocks are missing")
                if self._num_bytes != storage.block_bytes:
                    raise self._make_error(
                        f"a record has {self._num_bytes} bytes instead of {storage.block_bytes}"
                    )
                self._take_payload_into(buffer.rows[place].data)
                if target is not None:
                    moves.append((BlockId(place), target))
            buffer.storage.copy_to(storage, moves)
        storage.synchronize()

    def check_end(self) -> None:
        """Raise PoolDumpError unless the whole file has been read."""
        if self._kind != RecordKind.END:
            raise self._make_error(f"{self._kind.name} stands where its end should be")
        self._check_payload(self._read(self._num_bytes))
        if self._num_left:
            raise self._make_error(f"{self._num_left} bytes follow its end")

    def _read_frame(self) -> None:
        """Read the next record's frame."""
        self._number += 1
        packed = self._read(_FRAME.size)
        (checksum,) = _CHECKSUM.unpack(self._read(_CHECKSUM.size))
        kind, number, self._num_bytes, self._checksum = _FRAME.unpack(packed)
        if checksum != xxhash.xxh3_64_intdigest(packed) or number != self._number:
            raise self._make_error(f"record {self._number} has a wrong checksum or number")
        if self._num_bytes > self._num_left:
            raise self._make_error("it is truncated")
        try:
            self._kind = RecordKind(kind)
        except ValueError:
            raise self._make_error(f"record {number} is of kind {kind}") from None

    def _take_payload(self) -> bytes:
        """Return the payload of the current record and advance to the next record."""
        payload = self._read(self._num_bytes)
        self._check_payload(payload)
        self._read_frame()
        return payload

    def _take_payload_into(self, buffer: memoryview) -> None:
        """Read the payload of the current record, of this size, into `buffer`; advance to the next record."""
        if self._file.readinto(buffer) < buffer.nbytes:
            raise self._make_error("it is truncated")
        self._num_left -= buffer.nbytes
        self._check_payload(buffer)
        self._read_frame()

    def _check_payload(self, payload: _Payload) -> None:
        if xxhash.xxh3_64_intdigest(payload) != self._checksum:
            raise self._make_error(f"the content of record {self._number} has a wrong checksum")

    def _read(self, num_bytes: int) -> bytes:
        found = self._file.read(num_bytes)
        if len(found) < num_bytes:
            raise self._make_error("it is truncated")
        self._num_left -= num_bytes
        return found

    def _make_error(self, what: str) -> PoolDumpError:
        return PoolDumpError(f"{self._path} is damaged: {what}. Nothing was loaded")


# ---- the cached blocks of a pool, as rows -----------------------------------------------------------

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
    keys = _split(np.frombuffer(record.key_lengths, "<u4").tolist(), record.keys)
    lengths = np.frombuffer(record.parent_lengths, "<i4").tolist() or [-1] * len(ids)
    parents = _split([max(0, length) for length in lengths], record.parents)
    if not len(ids) == len(num_tokens) == len(num_keys) == len(parents) or sum(num_keys) != len(keys):
        raise ValueError("its columns have different lengths")
    if 0 in num_keys:
        raise ValueError("it has a block without a key")
    rows.ids += ids
    rows.num_tokens += num_tokens
    rows.parents += [None if length < 0 else parent for length, parent in zip(lengths, parents, strict=True)]
    left = map(BlockHashWithGroupId, keys)
    rows.keys += [list(islice(left, count)) for count in num_keys]


def _split(lengths: list[int], joined: bytes) -> list[bytes]:
    """Return the strings of these lengths that `joined` consists of. Raises ValueError if it does not."""
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] != len(joined):
        raise ValueError(f"it has {len(joined)} instead of {ends[-1]} bytes of keys or parents")
    return [joined[start:end] for start, end in pairwise(ends)]


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
