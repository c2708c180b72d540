"""A pool's memory map, printed by rich and drawn by matplotlib."""

from itertools import groupby, zip_longest

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from kv_pool.control.layout_cells import COLOURS, CellKind, make_map
from kv_pool.errors import DrawingError
from kv_pool.replay.pictures.figure import check_can_draw
from kv_pool.reports import PoolLayout

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
            _paint(text, rows[row], rows[row + 1] if row + 1 < len(rows) else [])
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


def _paint(text: Text, upper: list[CellKind], lower: list[CellKind]) -> None:
    """Append two rows as one line; the lower row may be shorter."""
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
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = make_map(layout, MAX_CELLS)
    num_columns = 1
    while num_columns * num_columns < len(shown.kinds):
        num_columns *= 2
    num_rows = -(-len(shown.kinds) // num_columns)
    cells = np.full(num_rows * num_columns, np.nan)
    cells[: len(shown.kinds)] = shown.kinds
    # Text stays text, and the file records neither time nor place of drawing.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kv_pool"}):
        width = min(9, 2 + num_columns / 4)
        figure = Figure(figsize=(width, 1.5 + width * num_rows / num_columns), facecolor="white")
        axes = figure.add_subplot()
        axes.imshow(
            cells.reshape(num_rows, num_columns),
            ListedColormap(COLOURS),
            vmin=0,
            vmax=len(COLOURS) - 1,
            interpolation="nearest",
        )
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
        try:
            figure.savefig(
                path, dpi=128, bbox_inches="tight", metadata={"Date": None} if path.endswith(".svg") else None
            )
        except (OSError, ValueError) as error:
            raise DrawingError(f"{path}: cannot write the picture: {error}") from error
