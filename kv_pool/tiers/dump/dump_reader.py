"""`DumpReader`: the file of a dumped pool, read from its beginning to its end, once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from kv_pool.core.kv_events import BlockStored
from kv_pool.errors import PoolDumpError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.regular_files import open_regular
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage, make_host_buffer
from kv_pool.tiers.dump.records import Frame, RecordKind, RecordReader
from kv_pool.tiers.dump.rows import CachedRows, KeyCopies, check_rows, decode_rows
from kv_pool.tiers.dump.told_blocks import decode_events

BATCH_BYTES = 32 * 1024 * 1024
"""Bytes of blocks that are in host memory at a time, on their way between storage and file."""


class PoolDumpHeader(msgspec.Struct, frozen=True):
    """What a dumped pool is, without its blocks.

    Attributes:
        layout: what bytes and hashes mean; None where nobody said.
        hash_block_size, num_hash_lookahead_tokens, medium, num_blocks: of the pool; the null block counts.
        num_cached: blocks with keys.
        num_evictions: the pool's count.
        block_bytes: of each block, where the bytes are in the file; 0 where there are keys only.
        next_sequence: the number of the next batch of events; None where no stream's state was dumped.
    """

    layout: BlockLayout | None
    hash_block_size: int
    num_hash_lookahead_tokens: int
    medium: str
    num_blocks: int
    num_cached: int
    num_evictions: int
    block_bytes: int
    next_sequence: int | None


def check_header(header: PoolDumpHeader) -> None:
    """Raise ValueError unless the header can be one of a pool."""
    counts = (header.num_hash_lookahead_tokens, header.num_cached, header.num_evictions, header.block_bytes)
    if min(*counts, header.next_sequence or 0) < 0 or min(header.hash_block_size, header.num_blocks) < 1:
        raise ValueError("its header has a negative count")


@dataclass
class DumpedBlocks:
    """The cached blocks of a dumped pool.

    Attributes:
        copies: the keys that several of them carry.
        stores: what was told of them.
    """

    rows: CachedRows
    copies: list[KeyCopies]
    stores: list[BlockStored]


@contextmanager
def open_dump(path: str | os.PathLike[str]) -> Iterator[DumpReader]:
    """The file, read up to its header. PoolDumpError where that is not possible."""
    name = os.fspath(path)
    try:
        with open(open_regular(path), "rb") as file:
            yield DumpReader(RecordReader(file, name))
    except OSError as error:  # nothing but reading raises it: what a storage does is a CopyFailedError
        raise PoolDumpError(f"no dumped pool can be read from {name}: {error.strerror}") from error


class DumpReader:
    """Reads what is in the file, in its order: the header, `read_blocks`, `read_bytes`, `check_end`.

    Raises:
        PoolDumpError: in any call: it is not as it was written.
    """

    def __init__(self, records: RecordReader) -> None:
        self._records = records
        self._frame: Frame = records.read_frame()
        if self._frame.kind != RecordKind.HEADER:
            raise records.make_error("it does not begin with a header")
        payload = self._take_payload()
        try:
            self.header = msgspec.msgpack.decode(payload, type=PoolDumpHeader)
            check_header(self.header)
        except UNDECODABLE as error:
            raise records.make_error(str(error)) from error

    def read_blocks(self) -> DumpedBlocks:
        """All that there is but the bytes."""
        rows = CachedRows()
        copies: list[KeyCopies] = []
        stores: list[BlockStored] = []
        try:
            while self._frame.kind == RecordKind.ROWS:
                decode_rows(self._take_payload(), rows)
            while self._frame.kind == RecordKind.COPIES:
                copies += msgspec.msgpack.decode(self._take_payload(), type=list[KeyCopies])
            check_rows(rows, copies, self.header.num_blocks, self.header.num_cached)
            while self._frame.kind == RecordKind.EVENTS:
                stores += decode_events(self._take_payload())
        except PoolDumpError:
            raise
        except UNDECODABLE as error:
            raise self._records.make_error(str(error)) from error
        return DumpedBlocks(rows, copies, stores)

    def read_bytes(self, storage: BlockStorage, targets: Sequence[int | None]) -> None:
        """Copy the bytes of each row to a block of the storage, or nowhere where that is None."""
        step = max(1, min(len(targets), BATCH_BYTES // storage.block_bytes))
        host = make_host_buffer(storage.block_bytes, step, storage.block_format)
        whole = memoryview(host.segments.owners[0])
        for start in range(0, len(targets), step):
            moves = []
            for place, target in enumerate(targets[start : start + step]):
                if self._frame.kind != RecordKind.DATA:
                    raise self._records.make_error("bytes of blocks are missing")
                first = place * storage.block_bytes
                self._records.read_payload_into(self._frame, whole[first : first + storage.block_bytes])
                self._frame = self._records.read_frame()
                if target is not None:
                    moves.append((place, target))
            host.copy_to(storage, moves)
        storage.synchronize()

    def check_end(self) -> None:
        """There is nothing that was not read."""
        if self._frame.kind != RecordKind.END:
            raise self._records.make_error(f"{self._frame.kind.name} stands where its end should be")
        self._records.read_payload(self._frame)
        self._records.check_end()

    def _take_payload(self) -> bytes:
        """The payload of the record that is next, and on to the one after it."""
        payload = self._records.read_payload(self._frame)
        self._frame = self._records.read_frame()
        return payload
