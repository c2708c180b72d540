"""A pool's memory map, printed by rich and drawn by matplotlib."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from kv_pool.drawing import check_can_draw, save_figure
from kv_pool.errors import DrawingError, InvalidArgumentError
from kv_pool.reports import BlockState, PoolLayout

Kinds = NDArray[np.integer[Any]]
Flags = NDArray[np.bool_]


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


COLOURS = ("#3C4043", "#A9B1BA", "#E3E7EB", "#D99A1C", "#F6D27A", "#0B559F", "#3F8FD2", "#D1340C")
"""By kind. Distinguishable with red-green colour blindness: colours also differ in brightness."""


class LegendLine(NamedTuple):
    """The meaning of some kinds of cells and the number of their blocks. A remark has no kinds.

    Attributes:
        percent: share of the pool's blocks; "" for the null block, which is not counted among them.
    """

    kinds: tuple[CellKind, ...]
    words: str
    num_blocks: int
    percent: str


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """A pool's blocks as cells by block id, with a title, two lines on the pool and a legend.

    Attributes:
        blocks_per_cell: a power of two; the last cell may have fewer.
        kinds: a `CellKind` per cell. A cell of several blocks shows the kind of most of them, or IMMOVABLE if
            any is held in place.
        legend: most important kind first, counted in blocks; kinds that do not occur are left out.
    """

    blocks_per_cell: int
    kinds: Kinds
    title: str
    use: str
    runs: str
    cell: str
    legend: list[LegendLine]


def make_map(layout: PoolLayout, max_cells: int) -> MemoryMap:
    """Divide a layout into at most `max_cells` cells, with as few blocks per cell as possible.

    Raises:
        InvalidArgumentError: `max_cells` is below 1.
    Cost: O(number of blocks).
    """
    if max_cells < 1:
        raise InvalidArgumentError(f"max_cells is {max_cells}; a memory map has at least 1 cell")
    kinds = _classify(layout)
    is_joined = np.frombuffer(layout.joins, np.uint8) == 1
    blocks_per_cell = 1
    while len(kinds) > max_cells * blocks_per_cell:
        blocks_per_cell *= 2
    cells = _gather(kinds, blocks_per_cell)
    is_odd = np.cumsum(_list_starts(cells, is_joined[::blocks_per_cell])) % 2 == 0
    cells[is_odd & (cells == CellKind.IN_USE)] = CellKind.IN_USE_NEXT
    num_runs = np.count_nonzero(_list_starts(kinds, is_joined)) if any(layout.holders) else 0
    mean_length = np.count_nonzero(kinds >= CellKind.IN_USE) / max(1, num_runs)
    free_share = layout.num_free / layout.num_blocks
    return MemoryMap(
        blocks_per_cell,
        cells,
        title=f"{layout.num_blocks:,} blocks of {layout.block_size} tokens on device {layout.device_id}",
        use=(
            f"{1 - free_share:.1%} in use, {free_share:.1%} free, "
            f"fragmentation {layout.fragmentation_rate:.1%} (runs of {layout.run_length})"
        ),
        runs=f"runs of sequences: {num_runs:,}, {mean_length:,.1f} blocks long on average"
        if num_runs
        else "no runs of sequences",
        cell=f"one cell = {blocks_per_cell:,} blocks: what most of them are, but held in place if any is"
        if blocks_per_cell > 1
        else "one cell = one block",
        legend=_make_legend(layout, kinds, shows_null=cells[0] == CellKind.NULL),
    )


def _make_legend(layout: PoolLayout, kinds: Kinds, shows_null: bool) -> list[LegendLine]:
    long, short = f"in free runs of {layout.run_length} or more", "in shorter free stretches"
    words = {
        (CellKind.IN_USE, CellKind.IN_USE_NEXT): "in use",
        (CellKind.IMMOVABLE,): "in use, held in place",
        (CellKind.CACHED_RUN,): f"cached, {long}",
        (CellKind.CACHED_SHORT,): f"cached, {short}",
        (CellKind.EMPTY_RUN,): f"empty, {long}",
        (CellKind.EMPTY_SHORT,): f"empty, {short}",
    }
    counts = np.bincount(kinds, minlength=len(CellKind)).tolist()
    counted = [(shown, text, counts[shown[0]]) for shown, text in words.items()]
    counted.append(((CellKind.NULL,), "the null block, id 0", int(shows_null)))
    num_shared = np.count_nonzero(np.frombuffer(layout.holders, np.uint8) > 1)
    counted.append(((), "shared by several sequences", num_shared))
    legend = []
    for shown, text, num_blocks in counted:
        share = num_blocks / layout.num_blocks
        percent = "" if CellKind.NULL in shown else f"{share:.1%}" if share >= 0.0005 else "< 0.1%"
        if num_blocks:
            legend.append(LegendLine(shown, text, num_blocks, percent))
    return legend


_KIND_BY_STATE = np.array(
    [CellKind.NULL, CellKind.EMPTY_SHORT, CellKind.CACHED_SHORT, CellKind.IN_USE, CellKind.IMMOVABLE],
    np.uint8,
)
"""By `BlockState`. Of free blocks in a run, it is the next one."""


def _classify(layout: PoolLayout) -> Kinds:
    """Return each block's kind, in one shade."""
    states = np.frombuffer(layout.states, np.uint8)
    is_free = (states == BlockState.EMPTY) | (states == BlockState.CACHED)
    borders = np.flatnonzero(np.diff(is_free, prepend=False, append=False))
    kinds = _KIND_BY_STATE[states]
    for start, stop in borders.reshape(-1, 2).tolist():
        if stop - start >= layout.run_length:
            kinds[start:stop] += 1
    return kinds


def _list_starts(kinds: Kinds, is_joined: Flags) -> Flags:
    """Return where runs in use begin: not joined to the place before, or that one is not in use."""
    is_used = kinds >= CellKind.IN_USE
    continues = is_joined.copy()
    continues[1:] &= is_used[:-1]
    starts: Flags = is_used & ~continues
    return starts


def _gather(kinds: Kinds, blocks_per_cell: int) -> Kinds:
    """Return the kind of each cell, in one shade. Of kinds with as many blocks, the last of `CellKind`."""
    if blocks_per_cell == 1:
        return kinds.copy()
    padded = np.zeros(-(-len(kinds) // blocks_per_cell) * blocks_per_cell, np.uint8)
    padded[: len(kinds)] = kinds
    by_cell = padded.reshape(-1, blocks_per_cell)
    counts = np.stack([np.count_nonzero(by_cell == kind, axis=1) for kind in reversed(CellKind)])
    counts[-1] = 0  # the null block, and cells beyond the last block, never are most
    gathered: Kinds = CellKind.IMMOVABLE - counts.argmax(0)
    gathered[counts[0] > 0] = CellKind.IMMOVABLE
    return gathered


SIGNS = "0._:=#%P"
"""By kind: dots are short stretches, lines are runs, and a fuller block has a denser sign."""

MAX_CELLS = 16_385
"""The most cells of a picture: 16,384 blocks and the null block."""

_MAX_COLUMNS = 128
_LINES_BESIDE_MAP = 15
_MIN_LINES, _LINES_IN_FILES = 8, 32


def print_layout(layout: PoolLayout, console: Console, num_columns: int | None = None) -> None:
    """Print a memory map that fits on one screen of at least 60 columns, with its legend.

    Block ids go from left to right, row by row. With 256 colours, a line shows two rows of coloured cells;
    otherwise each cell is a sign.

    Args:
        num_columns: cells in a row; None for the greatest power of two that fits.
    Raises:
        InvalidArgumentError: `num_columns` is below 1.
    Cost: O(number of blocks).
    """
    is_painted = console.color_system in ("256", "truecolor") and not console.no_color
    ids_width = len(f"{layout.num_blocks:,}")
    if num_columns is None:
        num_columns = _MAX_COLUMNS
        while num_columns > 1 and num_columns + ids_width + 1 > console.width:
            num_columns //= 2
    num_lines = (
        max(_MIN_LINES, console.height - _LINES_BESIDE_MAP) if console.is_terminal else _LINES_IN_FILES
    )
    shown = make_map(layout, num_columns * num_lines * (1 + is_painted))
    kinds = [CellKind(kind) for kind in shown.kinds.tolist()]
    rows = [kinds[first : first + num_columns] for first in range(0, len(kinds), num_columns)]
    text = Text.assemble((shown.title, "bold"), f"\n{shown.use}\n\n")
    for row in range(0, len(rows), 1 + is_painted):
        text.append(f"{row * num_columns * shown.blocks_per_cell:>{ids_width},} ", "dim")
        if is_painted:
            _paint(text, *rows[row : row + 2])
        else:
            text.append("".join(SIGNS[kind] for kind in rows[row]))
        text.append("\n")
    console.print(text, soft_wrap=True)
    legend = Table.grid(padding=(0, 1))
    for justify in ("left", "left", "right", "right"):
        legend.add_column(justify=justify)
    for line in shown.legend:
        signs = [Text("█", COLOURS[kind]) if is_painted else SIGNS[kind] for kind in line.kinds]
        legend.add_row(Text.assemble(*signs), line.words, f"{line.num_blocks:,}", line.percent)
    console.print(legend)
    console.print(f"\n{shown.runs}\n{shown.cell}", style="dim", highlight=False)


def _paint(text: Text, upper: list[CellKind], lower: Sequence[CellKind] = ()) -> None:
    """Append two rows as one line; the lower row may be shorter, or missing."""
    for (above, below), pairs in groupby(zip_longest(upper, lower)):
        behind = None if below is None else COLOURS[below]
        text.append("▀" * len(list(pairs)), Style(color=COLOURS[above], bgcolor=behind))


def draw_layout(layout: PoolLayout, path: str) -> None:
    """Draw a memory map to an image file (.png, .svg, .pdf). The same layout gives the same SVG.

    Block ids go from left to right, row by row. Rows are a power of two long, so that aligned slots line up.
    Raises:
        DrawingError: matplotlib is not installed, or the file cannot be written.
    Cost: O(number of blocks), and about a second.
    """
    check_can_draw(path, DrawingError)
    import matplotlib
    from matplotlib.colors import to_rgba_array
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = make_map(layout, MAX_CELLS)
    num_columns = 1
    while num_columns * num_columns < len(shown.kinds):
        num_columns *= 2
    num_rows = -(-len(shown.kinds) // num_columns)
    cells = np.full(num_rows * num_columns, len(COLOURS))
    cells[: len(shown.kinds)] = shown.kinds
    colours = to_rgba_array([*COLOURS, "white"])  # white after the last cell
    # Text stays text, and the file records neither time nor place of drawing.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kv_pool"}):
        width = min(9, 2 + num_columns / 4)
        figure = Figure(figsize=(width, 1.5 + width * num_rows / num_columns), facecolor="white")
        axes = figure.add_subplot()
        axes.imshow(colours[cells.reshape(num_rows, num_columns)], interpolation="nearest")
        axes.set_title(f"{shown.title}\n{shown.use}", loc="left", fontsize=11)
        axes.set_xlabel(
            "\n".join([shown.runs + "; neighbouring runs differ in shade", shown.cell]), loc="left"
        )
        for axis, count, step, sign in (
            (axes.xaxis, num_columns, 1, "+"),
            (axes.yaxis, num_rows, num_columns, ""),
        ):
            marks = range(0, count, 1 << max(0, (count - 1).bit_length() - 3))
            axis.set_ticks(marks, [f"{sign}{mark * step * shown.blocks_per_cell:,}" for mark in marks])
        axes.legend(
            handles=[
                Patch(
                    color=COLOURS[line.kinds[0]] if line.kinds else "none",
                    label=f"{line.words}: {line.num_blocks:,} {line.percent and f'({line.percent})'}",
                )
                for line in shown.legend
            ],
            loc="upper left",
            bbox_to_anchor=(1.02, 1),
            frameon=False,
        )
        date = {"Date": None} if path.endswith(".svg") else None
        save_figure(figure, path, DrawingError, dpi=128, bbox_inches="tight", metadata=date)
