"""In which order the bytes of blocks go over a connection, whatever the layouts at its ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kv_pool.errors import InvalidArgumentError
from kv_pool.storage.block_storage import BlockStorage, make_host_buffer
from kv_pool.storage.segments import IntArray, SegmentTable, split_alike
from kv_pool.storage.spans import HostSpans

# Below this, handing a span to the kernel costs more than gathering it: blocks go whole, through a buffer.
_SPAN_BYTES = 8 * 1024
_MAX_ROWS = 65_536


def list_rows(storage: BlockStorage) -> list[int]:
    """The spans of a block as this side would send them, in bytes; what the other side has to know of it."""
    if storage.device != "cpu":
        return [storage.block_bytes]
    rows: list[int] = storage.segments.spans.tolist()
    return rows


def choose_rows(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
    """The rows that both sides' blocks are cut into; the same whichever side asks.

    A piece of blocks goes row by row, and in each row block by block, so that each side can join what lies
    side by side in its memory. Where that would be many small rows, blocks go one after another, each whole.

    Raises:
        InvalidArgumentError: the rows are none, or do not make up blocks of one size.
    """
    if not 0 < len(theirs) <= _MAX_ROWS or min(theirs) < 1 or sum(theirs) != sum(ours):
        raise InvalidArgumentError(
            f"blocks of {sum(theirs)} bytes in {len(theirs)} rows there, of {sum(ours)} in {len(ours)} here"
        )
    cuts = np.union1d(np.cumsum(ours), np.cumsum(theirs))
    if len(cuts) * _SPAN_BYTES > cuts[-1]:
        return [sum(ours)]
    rows: list[int] = np.diff(cuts, prepend=0).tolist()
    return rows


class BlockWindow:
    """Blocks of one storage, a piece of them at a time, as memory that a socket reads or writes.

    Host memory that can be cut into these rows is used in place. What can not, such as that of a GPU, passes
    through a buffer.

    Args:
        rows: what `choose_rows` gave.
        max_blocks: of one piece.
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
        """The bytes of these blocks, in the order of the wire."""
        if self._buffer is None:
            return self._spans.list_views(block_ids)
        places = np.arange(len(block_ids), dtype=np.int64)
        self._storage.copy_to(self._buffer, np.stack([block_ids, places], axis=1))
        return self._spans.list_views(places)

    def get_room(self, block_ids: IntArray) -> list[memoryview]:
        """Where the bytes for these blocks go, in the order of the wire; then call `write_in`."""
        if self._buffer is None:
            return self._spans.list_views(block_ids)
        return self._spans.list_views(np.arange(len(block_ids), dtype=np.int64))

    def write_in(self, block_ids: IntArray) -> None:
        """What `get_room` gave is full: the blocks hold it on return."""
        if self._buffer is not None:
            places = np.arange(len(block_ids), dtype=np.int64)
            self._buffer.copy_to(self._storage, np.stack([places, block_ids], axis=1))


def _make_table(rows: Sequence[int]) -> SegmentTable:
    """A table of such rows, to cut another one by; it leads to no memory."""
    spans = np.array(rows, np.int64)
    return SegmentTable(1, np.zeros_like(spans), spans, spans, (None,) * len(rows))
