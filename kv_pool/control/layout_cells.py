"""A pool's layout as the cells of a memory map, with its legend and colours, however it is drawn then."""

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
    """What a cell shows.

    Free blocks lie in a run, which is `PoolLayout.run_length` blocks or longer, or in a shorter stretch. The
    runs of sequences are IN_USE and IN_USE_NEXT by turns.
    """

    NULL = 0
    EMPTY_SHORT = 1
    EMPTY_RUN = 2
    CACHED_SHORT = 3
    CACHED_RUN = 4
    IN_USE = 5
    IN_USE_NEXT = 6
    PINNED = 7


COLOURS = {
    CellKind.NULL: "#3C4043",
    CellKind.IN_USE: "#0B559F",
    CellKind.IN_USE_NEXT: "#3F8FD2",
    CellKind.PINNED: "#D1340C",
    CellKind.CACHED_RUN: "#F6D27A",
    CellKind.CACHED_SHORT: "#D99A1C",
    CellKind.EMPTY_RUN: "#E3E7EB",
    CellKind.EMPTY_SHORT: "#A9B1BA",
}
"""Told apart by people who see no red or no green, too: what differs in hue differs in brightness."""


@dataclass(frozen=True, slots=True)
class LayoutCells:
    """The cells of a memory map, by block id.

    Attributes:
        blocks_per_cell: a power of two; the last cell may have fewer.
        kinds: a `CellKind` each. Of several blocks a cell shows what most are, but held in place if any is.
        is_joined: the cell goes on with the run of the cell before it.
    """

    blocks_per_cell: int
    kinds: Numbers
    is_joined: Flags


@dataclass(frozen=True, slots=True)
class LegendLine:
    """What some kinds of cells mean, and how many blocks they are about; no kinds for a remark.

    Attributes:
        share: of the pool's blocks; 0 for the null block, which is none of them.
    """

    kinds: tuple[CellKind, ...]
    words: str
    num_blocks: int
    share: float

    @property
    def percent(self) -> str:
        return f"{self.share:.1%}" if self.share >= 0.0005 else "< 0.1%" if self.share else ""


def make_cells(layout: PoolLayout, max_cells: int) -> LayoutCells:
    """Divide a layout into at most `max_cells` cells, of as few blocks each as that takes.

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
    # Every other run of a sequence gets the other shade.
    is_used = kinds >= CellKind.IN_USE
    is_odd = np.cumsum(is_used & ~is_joined) % 2 == 0
    kinds[is_odd & (kinds == CellKind.IN_USE)] = CellKind.IN_USE_NEXT
    return LayoutCells(blocks_per_cell, kinds, is_joined)


def make_legend(layout: PoolLayout, cells: LayoutCells) -> list[LegendLine]:
    """What there is to be told apart in these cells of a layout, most important first, counted in blocks.

    What there is none of is left out.
    """
    counts = np.bincount(_classify(layout)[0], minlength=len(CellKind)).tolist()
    long = f"in free runs of {layout.run_length} or more"
    short = "in shorter free stretches"
    lines: list[tuple[tuple[CellKind, ...], str]] = [
        ((CellKind.IN_USE, CellKind.IN_USE_NEXT), "in use"),
        ((CellKind.PINNED,), "in use, held in place"),
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
        legend.append(LegendLine((), "held by several sequences", num_shared, num_shared / layout.num_blocks))
    return legend


def describe_runs(layout: PoolLayout) -> str:
    """How long the runs of sequences are."""
    if not any(layout.holders):
        return "no runs of sequences"
    kinds, is_joined = _classify(layout)
    is_used = kinds >= CellKind.IN_USE
    num_runs = int(np.count_nonzero(is_used & ~is_joined))
    mean_length = int(np.count_nonzero(is_used)) / num_runs
    return f"runs of sequences: {num_runs:,}, {mean_length:,.1f} blocks long on average"


def describe_pool(layout: PoolLayout) -> str:
    """Which pool a map shows."""
    return f"{layout.num_blocks:,} blocks of {layout.block_size} tokens on device {layout.device_id}"


def describe_use(layout: PoolLayout) -> str:
    """How full a pool is, and how scattered what is free."""
    free_share = layout.num_free / layout.num_blocks
    return (
        f"{1 - free_share:.1%} in use, {free_share:.1%} free, "
        f"fragmentation {layout.fragmentation_rate:.1%} (runs of {layout.run_length})"
    )


def describe_cell(cells: LayoutCells) -> str:
    """What one cell stands for."""
    if cells.blocks_per_cell == 1:
        return "one cell = one block"
    return f"one cell = {cells.blocks_per_cell:,} blocks: what most of them are, but held in place if any is"


def _classify(layout: PoolLayout) -> tuple[Numbers, Flags]:
    """For each block its kind, in one shade, and whether it goes on with the run of the one before."""
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
    """The same for cells of several blocks."""
    num_cells = -(-len(kinds) // blocks_per_cell)
    padded = np.zeros(num_cells * blocks_per_cell, np.uint8)  # beyond the end as if null
    padded[: len(kinds)] = kinds
    by_cell = padded.reshape(num_cells, blocks_per_cell)

    def count(*kinds: CellKind) -> Numbers:
        counts: Numbers = np.count_nonzero(np.isin(by_cell, kinds), axis=1)
        return counts

    num_used = count(CellKind.IN_USE, CellKind.PINNED)
    num_cached = count(CellKind.CACHED_SHORT, CellKind.CACHED_RUN)
    num_empty = count(CellKind.EMPTY_SHORT, CellKind.EMPTY_RUN)
    num_long = count(CellKind.CACHED_RUN, CellKind.EMPTY_RUN)
    num_free = num_cached + num_empty
    gathered = np.where(num_cached >= num_empty, CellKind.CACHED_SHORT, CellKind.EMPTY_SHORT).astype(np.uint8)
    gathered += 2 * num_long >= num_free
    gathered[num_used >= num_free] = CellKind.IN_USE
    gathered[count(CellKind.PINNED) > 0] = CellKind.PINNED
    gathered[num_used + num_free == 0] = CellKind.NULL
    # Two cells are joined where the blocks on both sides of the border are, and are what the cells show.
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
_KIND_BY_STATE[BlockState.PINNED] = CellKind.PINNED
