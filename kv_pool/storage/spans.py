"""`HostSpans`: memoryviews of blocks in host memory, with adjacent blocks joined."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from kv_pool.errors import InvalidBlockError
from kv_pool.ids import BlockId
from kv_pool.storage.segments import IntArray, SegmentTable


class HostSpans:
    """A segment table in host memory as memoryviews that read and write its bytes in place.

    Views keep the memory alive, as the table does. Construction costs microseconds per row, whatever the
    number of blocks.
    """

    def __init__(self, table: SegmentTable) -> None:
        self.table = table
        self._rows = [
            _view_memory(
                row.base_address, (table.num_blocks - 1) * row.stride_bytes + row.span_bytes, row.owner
            )
            for row in table.to_segments()
        ]

    def list_views(self, block_ids: IntArray) -> list[memoryview]:
        """Return writable, non-empty views of format B, row by row of the table, in each row block by block.

            row 0 of block a | row 0 of block b | ... | row 1 of block a | row 1 of block b | ...

        Blocks that are consecutive both in `block_ids` and in memory share a view, in rows without padding.

        Args:
            block_ids: (n,), int64, in any order.
        Raises:
            InvalidBlockError: an id is out of range.
        """
        check_block_ids(block_ids, self.table.num_blocks)
        starts, lengths = find_runs(block_ids)
        views = []
        for row, stride, span in zip(
            self._rows, self.table.strides.tolist(), self.table.spans.tolist(), strict=True
        ):
            if stride == span:
                begins = block_ids[starts] * stride
                ends = begins + lengths * span
            else:
                begins = block_ids * stride
                ends = begins + span
            views += [row[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        return views

    def list_block_views(self, block_id: BlockId) -> list[memoryview]:
        """Return views of the bytes of one block, in their order. The id is not checked."""
        return [
            row[block_id * stride : block_id * stride + span]
            for row, stride, span in zip(
                self._rows, self.table.strides.tolist(), self.table.spans.tolist(), strict=True
            )
        ]


def find_runs(*ids: IntArray) -> tuple[IntArray, IntArray]:
    """Find the runs in which all lists increase by one: return the first position and length of each.

    Args:
        ids: arrays of block ids, (n,) each; for moves, the sources and the targets.
    """
    count = len(ids[0])
    breaks = np.zeros(max(count - 1, 0), bool)
    for some in ids:
        breaks |= np.diff(some) != 1
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])[:count].astype(np.int64)
    return starts, np.diff(np.concatenate([starts, [count]]))


def count_pieces(source: SegmentTable, target: SegmentTable, sources: IntArray, targets: IntArray) -> int:
    """Return the number of memory pieces in a copy of blocks sources[i] to targets[i], adjacent ones merged.

    Args:
        source, target: tables that are cut alike (`split_alike`).
    """
    is_dense = (source.strides == source.spans) & (target.strides == target.spans)
    num_dense = int(is_dense.sum())
    num_runs = len(find_runs(sources, targets)[0])
    return num_dense * num_runs + (len(source) - num_dense) * len(sources)


def make_block_ids(block_ids: Sequence[BlockId] | IntArray, num_blocks: int) -> IntArray:
    """Return ids as (n,), int64. Raise InvalidBlockError if one is not in 0..num_blocks - 1."""
    try:
        ids = np.asarray(block_ids, np.int64).reshape(-1)
    except OverflowError as error:
        raise InvalidBlockError(f"a block id is not one of 0 to {num_blocks - 1}: {error}") from error
    check_block_ids(ids, num_blocks)
    return ids


def check_block_ids(block_ids: IntArray, num_blocks: int) -> None:
    """Raise InvalidBlockError if an id is not in 0..num_blocks - 1."""
    outside = (block_ids < 0) | (block_ids >= num_blocks)
    if outside.any():
        raise InvalidBlockError(f"block {block_ids[outside][0]} is not one of 0 to {num_blocks - 1}")


def _view_memory(address: int, num_bytes: int, owner: object) -> memoryview:
    memory: Any = (ctypes.c_ubyte * num_bytes).from_address(address)
    memory.owner = owner  # lives as long as any view
    return memoryview(memory).cast("B")
