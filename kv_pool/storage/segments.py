"""`SegmentTable`: where every block's bytes are, as spans, for all layouts, and views of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import BlockId

IntArray = npt.NDArray[np.int64]

_WIDEST_ALIGNMENT = 16


class Segment(NamedTuple):
    """One span of every block: that of block `b` begins at `base_address + b * stride_bytes`.

    The bytes between `span_bytes` and `stride_bytes` are not part of the block and are never read or written.
    `owner` is an object that keeps the memory alive, such as a tensor.
    """

    base_address: int
    stride_bytes: int
    span_bytes: int
    owner: Any


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """The spans of a block, in the order of the block's bytes.

        block b  =  [base 0 + b * stride 0, span 0 bytes)  ++  [base 1 + b * stride 1, span 1 bytes)  ++  ...

    A copy of block a to block b is one copy per row. Addresses are device addresses; the table does not
    record the device.

    Attributes:
        num_blocks: number of blocks; ids are 0 to num_blocks - 1.
        bases, strides, spans: (num_rows,), int64, on the CPU, in bytes, as in `Segment`.
        owners: one per row; they keep the memory alive as long as the table exists.
    """

    num_blocks: int
    bases: IntArray
    strides: IntArray
    spans: IntArray
    owners: tuple[Any, ...]

    @classmethod
    def from_segments(cls, segments: Iterable[Segment], num_blocks: int) -> SegmentTable:
        """Return a table of these rows; rows that are adjacent in memory are joined.

        Raises:
            InvalidArgumentError: no rows, no blocks, an empty span, or spans that overlap.
        Cost: O(rows * log(rows)), whatever the number of blocks.
        """
        rows = _join_neighbours(segments)
        if num_blocks < 1 or not rows:
            raise InvalidArgumentError(
                f"{num_blocks} blocks in {len(rows)} segments: at least one of each is needed"
            )
        table = cls(
            num_blocks,
            np.array([row.base_address for row in rows], np.int64),
            np.array([row.stride_bytes for row in rows], np.int64),
            np.array([row.span_bytes for row in rows], np.int64),
            tuple(row.owner for row in rows),
        )
        _check_no_overlap(table)
        return table

    @classmethod
    def overlay(cls, tables: Sequence[SegmentTable]) -> SegmentTable:
        """Return one table over the bytes of several groups that share block ids, and possibly memory.

        The groups of a hybrid model store different layers in the same bytes, because a block id belongs to
        one group at a time. Rows with the same base and stride are listed once, with the widest span.

        Raises:
            InvalidArgumentError: different numbers of blocks, or rows that overlap without having the same
                base and stride.
        """
        counts = sorted({table.num_blocks for table in tables})
        if len(counts) != 1:
            raise InvalidArgumentError(f"groups that share block ids differ in number of blocks: {counts}")
        widest: dict[tuple[int, int], Segment] = {}
        for table in tables:
            for row in table.to_segments():
                place = (row.base_address, row.stride_bytes)
                if place not in widest or widest[place].span_bytes < row.span_bytes:
                    widest[place] = row
        return cls.from_segments(widest.values(), counts[0])

    def to_segments(self) -> list[Segment]:
        return [
            Segment(*row)
            for row in zip(
                self.bases.tolist(), self.strides.tolist(), self.spans.tolist(), self.owners, strict=True
            )
        ]

    # ---- views in host memory --------------------------------------------------------------------

    @cached_property
    def _host_rows(self) -> list[tuple[memoryview, int, int]]:
        """For each row the memory of all blocks, their stride and the span."""
        last = self.num_blocks - 1
        return [
            (_view_memory(address, last * stride + span, owner), stride, span)
            for address, stride, span, owner in self.to_segments()
        ]

    def view_row(self, row: int) -> npt.NDArray[np.void]:
        """Return a view of one span of every block in host memory: (num_blocks,) elements of its bytes."""
        memory, stride, span = self._host_rows[row]
        return np.ndarray((self.num_blocks,), np.dtype((np.void, span)), memory, strides=(stride,))

    def list_views(self, block_ids: IntArray) -> list[memoryview]:
        """Return writable, non-empty views of format B, row by row of the table, in each row block by block.

            row 0 of block a | row 0 of block b | ... | row 1 of block a | row 1 of block b | ...

        Blocks that are consecutive both in `block_ids` and in memory share a view, in rows without padding.
        Views keep the memory alive, as the table does.

        Args:
            block_ids: (n,), int64, in any order.
        Raises:
            InvalidBlockError: an id is out of range.
        """
        check_block_ids(block_ids, self.num_blocks)
        starts, lengths = find_runs(block_ids)
        views = []
        for row, stride, span in self._host_rows:
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
        return [row[block_id * stride : block_id * stride + span] for row, stride, span in self._host_rows]

    # ---- sizes -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.bases)

    @property
    def block_bytes(self) -> int:
        return int(self.spans.sum())

    @property
    def alignment(self) -> int:
        """The largest of 16, 8, 4, 2, 1 that divides every base, stride and span, in bytes."""
        found = _WIDEST_ALIGNMENT
        for column in (self.bases, self.strides, self.spans):
            found = gcd(found, int(np.gcd.reduce(column)))
        return found


def split_alike(source: SegmentTable, target: SegmentTable) -> tuple[SegmentTable, SegmentTable]:
    """Return the two tables, cut so that row i of each covers the same bytes of a block.

        source   |-- row 0 --|-- row 1 --|-- row 2 --|
        target   |---- row 0 ----|------ row 1 ------|
        cut      |-- 0 ------| 1 |-- 2 --|-- 3 ------|

    Raises:
        InvalidArgumentError: the blocks have different sizes.
    """
    if source is target:
        return source, target
    if source.block_bytes != target.block_bytes:
        raise InvalidArgumentError(
            f"a block of the source has {source.block_bytes} bytes, one of the target {target.block_bytes}"
        )
    cuts = np.union1d(np.cumsum(source.spans), np.cumsum(target.spans))
    return _cut(source, cuts), _cut(target, cuts)


def _cut(table: SegmentTable, cuts: IntArray) -> SegmentTable:
    """Return the table with rows that end at `cuts`: (n,), int64, ascending, in bytes of a block.

    `cuts` must include the ends of the table's own rows.
    """
    if len(cuts) == len(table):
        return table
    ends = np.cumsum(table.spans)
    starts = np.concatenate([[0], cuts[:-1]])
    rows = np.searchsorted(ends, starts, side="right")
    return SegmentTable(
        table.num_blocks,
        table.bases[rows] + starts - (ends - table.spans)[rows],
        table.strides[rows],
        cuts - starts,
        tuple(table.owners[row] for row in rows.tolist()),
    )


def _join_neighbours(segments: Iterable[Segment]) -> list[Segment]:
    """Join each row to the row before it if it begins where that row ends, for every block.

    A joined span is never longer than its stride. (In a storage of a single block, a layer also begins where
    the previous layer ends; such rows must not be joined.)
    """
    rows: list[Segment] = []
    for row in segments:
        if row.span_bytes < 1:
            raise InvalidArgumentError(f"a segment has {row.span_bytes} bytes at {row.base_address:#x}")
        last = rows[-1] if rows else None
        if (
            last is not None
            and last.owner is row.owner
            and last.base_address + last.span_bytes == row.base_address
            and last.stride_bytes == row.stride_bytes
            and last.span_bytes + row.span_bytes <= row.stride_bytes
        ):
            rows[-1] = last._replace(span_bytes=last.span_bytes + row.span_bytes)
        else:
            rows.append(row)
    return rows


def _check_no_overlap(table: SegmentTable) -> None:
    """Raise InvalidArgumentError if two spans may share a byte.

    Rows whose extents intersect must have the same stride, and must not overlap modulo that stride:

        |row 0|row 1|  pad  |row 0|row 1|  pad  |
        |<---- stride ----->|
    """
    if table.num_blocks > 1 and (table.strides < table.spans).any():
        row = int(np.argmax(table.strides < table.spans))
        raise InvalidArgumentError(
            f"segment {row} has spans of {table.spans[row]} bytes every {table.strides[row]} bytes: "
            "blocks would overlap"
        )
    order = np.argsort(table.bases, kind="stable")
    bases, strides, spans = table.bases[order], table.strides[order], table.spans[order]
    ends = bases + (table.num_blocks - 1) * strides + spans
    # A cluster is a group of rows whose extents intersect; a new one starts after the ends of all before it.
    starts = np.concatenate([[True], bases[1:] >= np.maximum.accumulate(ends)[:-1]])
    for cluster in np.split(np.arange(len(order)), np.flatnonzero(starts)[1:]):
        if len(cluster) == 1:
            continue
        stride = int(strides[cluster[0]])
        if (strides[cluster] != stride).any():
            raise InvalidArgumentError(
                f"segments {order[cluster].tolist()} intersect with different strides "
                f"{np.unique(strides[cluster]).tolist()}: blocks would overlap"
            )
        places = (bases[cluster] - bases[cluster[0]]) % stride
        by_place = np.argsort(places, kind="stable")
        after = np.concatenate([places[by_place][1:], [stride]])
        too_long = places[by_place] + spans[cluster][by_place] > after
        if too_long.any():
            row = int(order[cluster[by_place[int(np.argmax(too_long))]]])
            raise InvalidArgumentError(
                f"segment {row} overlaps the next: {table.spans[row]} bytes at {table.bases[row]:#x}, "
                f"every {stride} bytes"
            )


# ---- runs of ids -------------------------------------------------------------------------------------


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
