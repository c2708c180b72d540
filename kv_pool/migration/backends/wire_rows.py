"""The order of block bytes on a connection, independent of the memory layouts on its two sides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kv_pool.errors import InvalidArgumentError
from kv_pool.storage.block_storage import BlockStorage, make_host_buffer
from kv_pool.storage.segments import IntArray, SegmentTable, split_alike
from kv_pool.storage.spans import HostSpans

# Below this span size, passing each span to the kernel costs more than a copy of the block to a buffer.
_SPAN_BYTES = 8 * 1024
_MAX_ROWS = 65_536


def list_rows(storage: BlockStorage) -> list[int]:
    """Return the spans, in bytes, into which this side's memory splits a block."""
    if storage.device != "cpu":
        return [storage.block_bytes]
    rows: list[int] = storage.segments.spans.tolist()
    return rows


def choose_rows(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
    """Return the rows, in bytes, into which both sides split their blocks. Symmetric in its arguments.

    A piece of blocks is sent row by row, and each row block by block, so that each side can merge contiguous
    memory. If the rows would be many and small, blocks are sent whole, one after another.

    Raises:
        InvalidArgumentError: there are no rows, or the block sizes differ.
    """
    if not 0 < len(theirs) <= _MAX_ROWS or min(theirs) < 1 or sum(theirs) != sum(ours):
        raise InvalidArgumentError(
            f"the peer's blocks have {sum(theirs)} bytes in {len(theirs)} rows, the local ones {sum(ours)} "
            f"bytes in {len(ours)} rows"
        )
    cuts = np.union1d(np.cumsum(ours), np.cumsum(theirs))
    if len(cuts) * _SPAN_BYTES > cuts[-1]:
        return [sum(ours)]
    rows: list[int] = np.diff(cuts, prepend=0).tolist()
    return rows


class BlockWindow:
    """A window on blocks of one storage as memory views that a socket reads or writes, one piece at a time.

    Host memory that can be split into these rows is used in place. Other memory, such as a GPU's, is copied
    through a buffer.

    Args:
        rows: from `choose_rows`.
        max_blocks: maximum number of blocks of one piece.
    """

    def __init__(self, storage: BlockStorage, rows: Sequence[int], max_blocks: int) -> None:
        self._storage = storage
        self._buffer: BlockStorage | None = None
        table = storage.segments
        if storage.device != "cpu" or len(table) > len(rows):
            self._buffer = make_host_buffer(storage.block_bytes, max_blocks, storage.block_format)
            table = self._buffer.segments
        self._spans = HostSpans(split_alike(table, _make_table(rows))[0])

    def read_out(self, block_ids: IntArray) -> list[memoryview]:
        """Return views of the bytes of these blocks, in wire order."""
        if self._buffer is None:
            return self._spans.list_views(block_ids)
        places = np.arange(len(block_ids), dtype=np.int64)
        self._storage.copy_to(self._buffer, np.stack([block_ids, places], axis=1))
        return self._spans.list_views(places)

    def list_target_views(self, block_ids: IntArray) -> list[memoryview]:
        """Return views to receive the bytes of these blocks into, in wire order; then call `write_in`."""
        if self._buffer is None:
            return self._spans.list_views(block_ids)
        return self._spans.list_views(np.arange(len(block_ids), dtype=np.int64))

    def write_in(self, block_ids: IntArray) -> None:
        """Complete a receive: the views of `list_target_views` are full; on return the blocks have them."""
        if self._buffer is not None:
            places = np.arange(len(block_ids), dtype=np.int64)
            self._buffer.copy_to(self._storage, np.stack([places, block_ids], axis=1))


def _make_table(rows: Sequence[int]) -> SegmentTable:
    """Return a table with these rows and without memory, for splitting another table alike."""
    spans = np.array(rows, np.int64)
    return SegmentTable(1, np.zeros_like(spans), spans, spans, (None,) * len(rows))
