"""`SegmentTable`: where the bytes of every block lie, as spans; what every layout comes down to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kv_pool.errors import InvalidArgumentError

IntArray = npt.NDArray[np.int64]

_WIDEST_ALIGNMENT = 16


class Segment(NamedTuple):
    """One span that every block has: block `b`'s begins at `base_address + b * stride_bytes`.

    What lies between `span_bytes` and `stride_bytes` belongs to someone else and is never read or written.
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

    Moving block a to b is one copy a row. Addresses are those of the device that the memory is on; the table
    does not know which.

    Attributes:
        num_blocks: blocks 0 to num_blocks - 1 have bytes.
        bases, strides, spans: (num_rows,), int64, on the CPU: bytes, as in `Segment`.
        owners: one a row; they keep the memory alive as long as the table lives.
    """

    num_blocks: int
    bases: IntArray
    strides: IntArray
    spans: IntArray
    owners: tuple[Any, ...]

    @classmethod
    def from_segments(cls, segments: Iterable[Segment], num_blocks: int) -> SegmentTable:
        """A table of these rows, those that follow each other in memory joined.

        Raises:
            InvalidArgumentError: no rows, no blocks, an empty span, or spans that overlap.

        Cost: O(rows * log(rows)), whatever the number of blocks.
        """
        rows = _join_neighbours(segments)
        if num_blocks < 1 or not rows:
            raise InvalidArgumentError(
                f"{num_blocks} blocks in {len(rows)} segments: there must be one of each"
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
        """One table over the bytes of several groups that share block ids, and maybe memory.

        Groups of a hybrid model lay different layers over the same bytes, since a block id belongs to one
        group at a time. Rows with the same base and stride are listed once, with the widest span.

        Raises:
            InvalidArgumentError: unequal counts of blocks, or rows that overlap and are not the same place.
        """
        counts = sorted({table.num_blocks for table in tables})
        if len(counts) != 1:
            raise InvalidArgumentError(f"groups that share block ids have one number of blocks, not {counts}")
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
    """The same two tables, cut so that row i of one holds the same bytes of a block as row i of the other.

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
    """Rows that end at `cuts`, (n,) int64 ascending, in bytes of a block; its own ends are among them."""
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
    """Join each row to the one before it where it begins at that one's end, for every block.

    A joined span never outgrows its stride: with one block a layer ends where the next begins, too, and
    that is no neighbour.
    """
    rows: list[Segment] = []
    for row in segments:
        if row.span_bytes < 1:
            raise InvalidArgumentError(f"a segment of {row.span_bytes} bytes at {row.base_address:#x}")
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
    """Raise InvalidArgumentError where two spans may share a byte.

    Rows whose extents meet must have one stride, and then lie apart modulo that stride:

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
    # A cluster is a stretch of rows whose extents meet; a new one starts where all before it have ended.
    starts = np.concatenate([[True], bases[1:] >= np.maximum.accumulate(ends)[:-1]])
    for cluster in np.split(np.arange(len(order)), np.flatnonzero(starts)[1:]):
        if len(cluster) == 1:
            continue
        stride = int(strides[cluster[0]])
        if (strides[cluster] != stride).any():
            raise InvalidArgumentError(
                f"segments {order[cluster].tolist()} lie in each other with strides "
                f"{np.unique(strides[cluster]).tolist()}: blocks would overlap"
            )
        places = (bases[cluster] - bases[cluster[0]]) % stride
        by_place = np.argsort(places, kind="stable")
        after = np.concatenate([places[by_place][1:], [stride]])
        too_long = places[by_place] + spans[cluster][by_place] > after
        if too_long.any():
            row = int(order[cluster[by_place[int(np.argmax(too_long))]]])
            raise InvalidArgumentError(
                f"segment {row} reaches into the next: {table.spans[row]} bytes at {table.bases[row]:#x}, "
                f"every {stride} bytes"
            )
