"""The cells, legend and colours of a memory map, for every way of drawing it."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_pool.errors import InvalidArgumentError
from kv_pool.reports import BlockState, PoolLayout

Flags = NDArray[np.bool_]
Numbers = NDArray[np.integer[Any]]


class CellKind(IntEnum):
    """The content of a cell.

    A free stretch of `PoolLayout.run_length` blocks or more is a RUN, a shorter one SHORT. Consecutive runs
    of sequences alternate between IN_USE and IN_USE_NEXT.
    """

    NULL = 0
    EMPTY_SHORT = 1
    EMPTY_RUN = 2
    CACHED_SHORT = 3
    CACHED_RUN = 4
    IN_USE = 5
    IN_USE_NEXT = 6
    IMMOVABLE = 7


COLOURS = {
    CellKind.NULL: "#3C4043",
    CellKind.IN_USE: "#0B559F",
    CellKind.IN_USE_NEXT: "#3F8FD2",
    CellKind.IMMOVABLE: "#D1340C",
    CellKind.CACHED_RUN: "#F6D27A",
    CellKind.CACHED_SHORT: "#D99A1C",
    CellKind.EMPTY_RUN: "#E3E7EB",
    CellKind.EMPTY_SHORT: "#A9B1BA",
}
"""Distinguishable with red-green colour blindness: colours also differ in brightness."""


@dataclass(frozen=True, slots=True)
class LayoutCells:
    """The cells of a memory map, by block id.

    Attributes:
        blocks_per_cell: a power of two; the last cell may have fewer.
        kinds: a `CellKind` per cell. A cell of several blocks shows the kind of most of them, or IMMOVABLE if
            any is held in place.
        is_joined: whether the cell continues the run of the cell before it.
    """

    blocks_per_cell: int
    kinds: Numbers
    is_joined: Flags


@dataclass(frozen=True, slots=True)
class LegendLine:
    """The meaning of some kinds of cells and the number of their blocks. A remark has no kinds.

    Attributes:
        share: fraction of the pool's blocks; 0 for the null block, which is not counted among them.
    """

    kinds: tuple[CellKind, ...]
    words: str
    num_blocks: int
    share: float

    @property
    def percent(self) -> str:
        return f"{self.share:.1%}" if self.share >= 0.0005 else "< 0.1%" if self.share else ""


def make_cells(layout: PoolLayout, max_cells: int) -> LayoutCells:
    """Divide a layout into at most `max_cells` cells, with as few blocks per cell as possible.

    Raises:
        InvalidArgumentError: `max_cells` is below 1.
    Cost: O(number of blocks).
    """
    if max_cells < 1:
        raise InvalidArgumentError(f"max_cells is {max_cells}; a memory map has at least 1 cell")
    kinds, is_joined = _classify(layout)
    blocks_per_cell = 1
    while len(kinds) > max_cells * blocks_per_cell:
        blocks_per_cell *= 2
    if blocks_per_cell > 1:
        kinds, is_joined = _gather(kinds, is_joined, blocks_per_cell)
    # Every second run of a sequence gets the other shade.
    is_used = kinds >= CellKind.IN_USE
    is_odd = np.cumsum(is_used & ~is_joined) % 2 == 0
    kinds[is_odd & (kinds == CellKind.IN_USE)] = CellKind.IN_USE_NEXT
    return LayoutCells(blocks_per_cell, kinds, is_joined)


def make_legend(layout: PoolLayout, cells: LayoutCells) -> list[LegendLine]:
    """Return the legend of these cells, most important kind first, counted in blocks.

    Kinds that do not occur are left out.
    """
    counts = np.bincount(_classify(layout)[0], minlength=len(CellKind)).tolist()
    long = f"in free runs of {layout.run_length} or more"
    short = "in shorter free stretches"
    lines: list[tuple[tuple[CellKind, ...], str]] = [
        ((CellKind.IN_USE, CellKind.IN_USE_NEXT), "in use"),
        ((CellKind.IMMOVABLE,), "in use, held in place"),
        ((CellKind.CACHED_RUN,), f"cached, {long}"),
        ((CellKind.CACHED_SHORT,), f"cached, {short}"),
        ((CellKind.EMPTY_RUN,), f"empty, {long}"),
        ((CellKind.EMPTY_SHORT,), f"empty, {short}"),
    ]
    legend = [
        LegendLine(kinds, words, counts[kinds[0]], counts[kinds[0]] / layout.num_blocks)
        for kinds, words in lines
        if counts[kinds[0]]
    ]
    if cells.kinds[0] == CellKind.NULL:
        legend.append(LegendLine((CellKind.NULL,), "the null block, id 0", 1, 0.0))
    num_shared = int(np.count_nonzero(np.frombuffer(layout.holders, np.uint8) > 1))
    if num_shared:
        legend.append(
            LegendLine((), "shared by several sequences", num_shared, num_shared / layout.num_blocks)
        )
    return legend


def describe_runs(layout: PoolLayout) -> str:
    """Return one line on the number and mean length of the runs of sequences."""
    if not any(layout.holders):
        return "no runs of sequences"
    kinds, is_joined = _classify(layout)
    is_used = kinds >= CellKind.IN_USE
    num_runs = int(np.count_nonzero(is_used & ~is_joined))
    mean_length = int(np.count_nonzero(is_used)) / num_runs
    return f"runs of sequences: {num_runs:,}, {mean_length:,.1f} blocks long on average"


def describe_pool(layout: PoolLayout) -> str:
    """Return one line on the pool that a map shows."""
    return f"{layout.num_blocks:,} blocks of {layout.block_size} tokens on device {layout.device_id}"


def describe_use(layout: PoolLayout) -> str:
    """Return one line on how full and how fragmented a pool is."""
    free_share = layout.num_free / layout.num_blocks
    return (
        f"{1 - free_share:.1%} in use, {free_share:.1%} free, "
        f"fragmentation {layout.fragmentation_rate:.1%} (runs of {layout.run_length})"
    )


def describe_cell(cells: LayoutCells) -> str:
    """Return one line on what one cell stands for."""
    if cells.blocks_per_cell == 1:
        return "one cell = one block"
    return f"one cell = {cells.blocks_per_cell:,} blocks: what most of them are, but held in place if any is"


def _classify(layout: PoolLayout) -> tuple[Numbers, Flags]:
    """Return each block's kind, in one shade, and whether it continues the run of the block before it."""
    states = np.frombuffer(layout.states, np.uint8)
    is_free = (states == BlockState.EMPTY) | (states == BlockState.CACHED)
    is_first = is_free.copy()
    is_first[1:] &= ~is_free[:-1]
    runs = np.cumsum(is_first)
    lengths = np.bincount(runs[is_free], minlength=len(states) + 1)
    is_long = is_free & (lengths[runs] >= layout.run_length)
    kinds = _KIND_BY_STATE[states]
    kinds[is_long] += 1
    is_joined = np.frombuffer(layout.joins, np.uint8) == 1
    return kinds, is_joined | (is_long & ~is_first)


def _gather(kinds: Numbers, is_joined: Flags, blocks_per_cell: int) -> tuple[Numbers, Flags]:
    """Merge blocks into cells of several blocks; otherwise as `_classify`."""
    num_cells = -(-len(kinds) // blocks_per_cell)
    padded = np.zeros(num_cells * blocks_per_cell, np.uint8)  # cells beyond the end count as null
    padded[: len(kinds)] = kinds
    by_cell = padded.reshape(num_cells, blocks_per_cell)

    def count(*kinds: CellKind) -> Numbers:
        counts: Numbers = np.count_nonzero(np.isin(by_cell, kinds), axis=1)
        return counts

    num_used = count(CellKind.IN_USE, CellKind.IMMOVABLE)
    num_cached = count(CellKind.CACHED_SHORT, CellKind.CACHED_RUN)
    num_empty = count(CellKind.EMPTY_SHORT, CellKind.EMPTY_RUN)
    num_long = count(CellKind.CACHED_RUN, CellKind.EMPTY_RUN)
    num_free = num_cached + num_empty
    gathered = np.where(num_cached >= num_empty, CellKind.CACHED_SHORT, CellKind.EMPTY_SHORT).astype(np.uint8)
    gathered += 2 * num_long >= num_free
    gathered[num_used >= num_free] = CellKind.IN_USE
    gathered[count(CellKind.IMMOVABLE) > 0] = CellKind.IMMOVABLE
    gathered[num_used + num_free == 0] = CellKind.NULL
    # Two cells are joined if the blocks on both sides of the border are, and match what the cells show.
    shows_use = gathered >= CellKind.IN_USE
    firsts = by_cell[:, 0] >= CellKind.IN_USE
    lasts = by_cell[:, -1] >= CellKind.IN_USE
    is_border_joined = is_joined[::blocks_per_cell].copy()
    is_border_joined &= firsts == shows_use
    is_border_joined[1:] &= lasts[:-1] == shows_use[:-1]
    return gathered, is_border_joined


_KIND_BY_STATE = np.zeros(len(BlockState), np.uint8)
_KIND_BY_STATE[BlockState.EMPTY] = CellKind.EMPTY_SHORT  # one more in a run
_KIND_BY_STATE[BlockState.CACHED] = CellKind.CACHED_SHORT
_KIND_BY_STATE[BlockState.IN_USE] = CellKind.IN_USE
_KIND_BY_STATE[BlockState.IMMOVABLE] = CellKind.IMMOVABLE
