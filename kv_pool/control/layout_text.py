"""A pool's memory map for a terminal: painted, or in signs if there are no colours."""

from collections.abc import Mapping
from enum import Enum
from itertools import groupby, zip_longest

from rich.console import Console
from rich.style import Style
from rich.text import Text

from kv_pool.control.layout_cells import (
    COLOURS,
    CellKind,
    describe_cell,
    describe_pool,
    describe_runs,
    describe_use,
    make_cells,
    make_legend,
)
from kv_pool.reports import PoolLayout

_PAINT = dict.fromkeys(CellKind, "█")
# Dots are short stretches, lines are runs. A fuller block has a denser sign.
_SIGNS = {
    CellKind.NULL: "0",
    CellKind.EMPTY_SHORT: ".",
    CellKind.EMPTY_RUN: "_",
    CellKind.CACHED_SHORT: ":",
    CellKind.CACHED_RUN: "=",
    CellKind.IN_USE: "█",
    CellKind.IN_USE_NEXT: "▓",
    CellKind.IMMOVABLE: "P",
}
_ASCII_SIGNS = {**_SIGNS, CellKind.IN_USE: "#", CellKind.IN_USE_NEXT: "%"}
_STYLES = {kind: Style(color=colour) for kind, colour in COLOURS.items()}
_PLAIN = Style()

_MAX_COLUMNS = 128
_LINES_BESIDE_MAP = 15
_MIN_LINES, _LINES_IN_FILES = 8, 32


class Look(Enum):
    """The way in which cells are drawn: by colours with two rows per line, by signs, or by ASCII signs."""

    PAINTED = "painted"
    SIGNS = "signs"
    ASCII = "ascii"

    @property
    def signs(self) -> Mapping[CellKind, str]:
        return {Look.PAINTED: _PAINT, Look.SIGNS: _SIGNS, Look.ASCII: _ASCII_SIGNS}[self]


def choose_look(console: Console) -> Look:
    """Return the richest look that this console can show."""
    if console.color_system in ("256", "truecolor") and not console.no_color:
        return Look.PAINTED
    return Look.ASCII if console.options.ascii_only else Look.SIGNS


def print_layout(layout: PoolLayout, console: Console, num_columns: int | None = None) -> None:
    """Print a memory map that fits on one screen, with its legend.

    Args:
        num_columns: cells in a row; None for the greatest power of two that fits.
    Raises:
        InvalidArgumentError: `num_columns` is below 1.
    """
    if num_columns is None:
        num_columns = _MAX_COLUMNS
        while num_columns > 1 and num_columns + _measure_ids(layout) + 1 > console.width:
            num_columns //= 2
    num_lines = max(_MIN_LINES, console.height - _LINES_BESIDE_MAP)
    if not console.is_terminal:
        num_lines = _LINES_IN_FILES
    console.print(make_text(layout, choose_look(console), num_columns, num_lines), soft_wrap=True)


def make_text(layout: PoolLayout, look: Look, num_columns: int, num_lines: int) -> Text:
    """Return a memory map of at most `num_lines` lines, and its legend.

    Block ids go from left to right, row by row. A painted map has two rows per line.
    Raises:
        InvalidArgumentError: `num_columns` is below 1.
    Cost: O(number of blocks).
    """
    rows_per_line = 2 if look is Look.PAINTED else 1
    cells = make_cells(layout, num_columns * num_lines * rows_per_line)
    kinds = [CellKind(kind) for kind in cells.kinds.tolist()]
    rows = [kinds[first : first + num_columns] for first in range(0, len(kinds), num_columns)]
    text = Text()
    text.append(describe_pool(layout), "bold").append(f"\n{describe_use(layout)}\n\n")
    for row in range(0, len(rows), rows_per_line):
        first_id = row * num_columns * cells.blocks_per_cell
        text.append(f"{first_id:>{_measure_ids(layout)},} ", "dim")
        if look is Look.PAINTED:
            _paint(text, rows[row], rows[row + 1] if row + 1 < len(rows) else [])
        else:
            _write(text, rows[row], look)
        text.append("\n")
    text.append("\n")
    for line in make_legend(layout, cells):
        _write(text, list(line.kinds), look)
        words = f"{'':{3 - len(line.kinds)}}{line.words:<36}{line.num_blocks:>12,}{line.percent:>9}"
        text.append(words.rstrip() + "\n")
    text.append(f"\n{describe_runs(layout)}\n{describe_cell(cells)}", "dim")
    return text


def _paint(text: Text, upper: list[CellKind], lower: list[CellKind]) -> None:
    """Append two rows as one line; the lower row may be shorter."""
    for (above, below), pairs in groupby(zip_longest(upper, lower)):
        style = _STYLES[above] if below is None else Style(color=COLOURS[above], bgcolor=COLOURS[below])
        text.append("▀" * len(list(pairs)), style)


def _write(text: Text, row: list[CellKind], look: Look) -> None:
    for kind, same in groupby(row):
        text.append(look.signs[kind] * len(list(same)), _STYLES[kind] if look is Look.PAINTED else _PLAIN)


def _measure_ids(layout: PoolLayout) -> int:
    """Return the width of the ids at the beginning of rows."""
    return len(f"{layout.num_blocks:,}")
