"""`DumpReader`: reads a pool dump once, from beginning to end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from kv_pool.core.kv_events import BlockStored
from kv_pool.errors import PoolDumpError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.ids import BlockId
from kv_pool.regular_files import open_regular
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage, make_host_buffer
from kv_pool.tiers.loaded_events import decode_events
from kv_pool.tiers.dump_file import Frame, RecordKind, RecordReader
from kv_pool.tiers.dump_rows import CachedRows, KeyCopies, check_rows, decode_rows

BATCH_BYTES = 32 * 1024 * 1024
"""Size of the host buffer between storage and file."""


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
    hash_block_size: int
    num_hash_lookahead_tokens: int
    medium: str
    num_blocks: int
    num_cached: int
    num_evictions: int
    block_bytes: int
    next_sequence: int | None
    random_seed: str = ""


@dataclass
class DumpedBlocks:
    """The cached blocks of a pool dump.

    Attributes:
        rows: the blocks, the next to be evicted first.
        copies: the keys that several blocks carry.
        stores: the events published about the blocks.
    """

    rows: CachedRows
    copies: list[KeyCopies]
    stores: list[BlockStored]


@contextmanager
def open_dump(path: str | os.PathLike[str]) -> Iterator[DumpReader]:
    """Open a dump and read its header. Raises PoolDumpError if that fails."""
    name = os.fspath(path)
    try:
        with open(open_regular(path), "rb") as file:
            yield DumpReader(RecordReader(file, name))
    except OSError as error:  # only reading raises it; a storage raises CopyFailedError
        raise PoolDumpError(f"no dumped pool can be read from {name}: {error.strerror}") from error


class DumpReader:
    """A sequential reader: the header, then `read_blocks`, `read_bytes`, `check_end`, in this order.

    Raises:
        PoolDumpError: from any call, if the file is damaged.
    """

    def __init__(self, records: RecordReader) -> None:
        self._records = records
        self._frame: Frame = records.read_frame()
        if self._frame.kind != RecordKind.HEADER:
            raise records.make_error("it does not begin with a header")
        payload = self._take_payload()
        try:
            self.header = header = msgspec.msgpack.decode(payload, type=PoolDumpHeader)
        except UNDECODABLE as error:
            raise records.make_error(str(error)) from error
        counts = header.num_hash_lookahead_tokens, header.num_cached, header.num_evictions
        least = min(*counts, header.block_bytes, header.next_sequence or 0)
        if least < 0 or min(header.hash_block_size, header.num_blocks) < 1:
            raise records.make_error("its header has a negative count")

    def read_blocks(self) -> DumpedBlocks:
        """Read everything except the bytes of the blocks."""
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

    def read_bytes(self, storage: BlockStorage, targets: Sequence[BlockId | None]) -> None:
        """Copy the bytes of each row to its target block in the storage; skip rows with target None."""
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
                    moves.append((BlockId(place), target))
            host.copy_to(storage, moves)
        storage.synchronize()

    def check_end(self) -> None:
        """Raise PoolDumpError unless the whole file has been read."""
        if self._frame.kind != RecordKind.END:
            raise self._records.make_error(f"{self._frame.kind.name} stands where its end should be")
        self._records.read_payload(self._frame)
        self._records.check_end()

    def _take_payload(self) -> bytes:
        """Return the payload of the current record and advance to the next record."""
        payload = self._records.read_payload(self._frame)
        self._frame = self._records.read_frame()
        return payload
