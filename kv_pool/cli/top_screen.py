"""The screen of `kv-pool top`: a `Frame` as lines of styled text."""

import time
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment, Segments
from rich.style import Style

from kv_pool.cli.foreign_text import escape_text
from kv_pool.cli.top_sources import HIT, LOOKED_UP, Bar, Frame
from kv_pool.reports.pool_view import MapCell

Line = list[tuple[str, str]]
"""Texts with their rich styles."""

KEYS = "q quit  space pause  s sort  / filter"
_BAR_CELLS = 24
_MIN_NAME = 8
_GAP = "  "
_SPARKS = "▁▂▃▄▅▆▇█"
_SIGNS = {
    "_": ("bright_black", "empty"),
    "=": ("yellow", "cached"),
    "+": ("cyan", "partly"),
    "#": ("blue", "in use"),
    "P": ("red", "held"),
}
"""Those of `kv-pool layout`, and one for a cell that is partly in use: their styles and meanings."""


@dataclass
class Choices:
    """The choices of the user, made with keys.

    Attributes:
        column: rows are sorted by this column of numbers, counted from the left, the highest first.
        filter: only rows with this text in their first column are shown.
        is_typing: keys are letters of the filter.
        number: of the pool that is shown.
    """

    column: int = 0
    filter: str = ""
    is_typing: bool = False
    is_paused: bool = False
    number: int = 0

    def obey(self, key: str) -> bool:
        """Change what a key stands for. Returns False for the key that ends the command."""
        if self.is_typing or key == "\x1b":
            self.is_typing = self.is_typing and key not in "\r\n\x1b"
            self.filter = (
                "" if key == "\x1b" else self.filter[:-1] if key in "\b\x7f" else self.filter + key.strip()
            )
            return True
        self.column += key == "s"
        self.is_typing = key == "/"
        self.is_paused ^= key == " "
        self.number += key == "\t"
        return key != "q"


def make_screen(lines: list[Line]) -> Segments:
    """Return lines as a renderable, without markup and folding: rich draws it in a millisecond."""
    ended = [[*line, ("\n", "")] for line in lines]
    return Segments(Segment(text, Style.parse(style)) for line in ended for text, style in line)


def draw(frame: Frame, choices: Choices, width: int, height: int, keys: str = "") -> list[Line]:
    """Return the lines of a frame, as many as fit."""
    state = "paused " * choices.is_paused + time.strftime("%H:%M:%S", time.localtime(frame.time_s))
    title = set_cell_size(f"kv-pool top  {escape_text(frame.source)}", max(0, width - len(state) - 1))
    lines: list[Line] = [[(f"{title} {state}", "bold reverse")]]
    if frame.trouble:
        lines.append([(f"not connected: {escape_text(frame.trouble)}", "bold red")])
    rows = [(escape_text(bar.name), _draw_bar(bar)) for bar in frame.bars]
    rows.append(("hits", _draw_hits(frame, width)))
    size = max(_MIN_NAME, *(cell_len(name) + 1 for name, _ in rows))
    lines += [[(set_cell_size(name, size), "bold"), *line] for name, line in rows if line]
    lines += _draw_words(frame, width) + _draw_map(frame, width)
    room = max(0, height - bool(keys))
    tables = [(title, rows) for title, rows in frame.tables.items() if rows]
    while tables:
        title, table = tables.pop(0)
        lines += _draw_table(title, table, choices, width, (room - len(lines)) // (3 if tables else 1))
    lines = lines[:room]
    if keys:
        typed = f"  / {escape_text(choices.filter)}{'_' * choices.is_typing}"
        lines += [[]] * (room - len(lines))
        lines.append([(keys, "dim"), (typed if choices.filter or choices.is_typing else "", "bold")])
    return lines


def _draw_bar(bar: Bar) -> Line:
    used, cached = (share / (bar.total or 1) for share in (bar.used, bar.cached or 0))
    num_used = round(_BAR_CELLS * min(1, used))
    num_cached = min(_BAR_CELLS - num_used, round(_BAR_CELLS * min(1, cached)))
    words = f" {used:.1%} in use"
    words += "" if bar.cached is None else f", {cached:.1%} cached"
    words += bar.unit and f", of {bar.total:,.0f} {bar.unit}"
    line = [("█" * num_used, "blue"), ("▒" * num_cached, "yellow")]
    return [*line, ("░" * (_BAR_CELLS - num_used - num_cached), "dim"), (words, "")]


def _draw_hits(frame: Frame, width: int) -> Line:
    if frame.hit_rate is None:
        return []
    rates = frame.hit_rates[-max(1, width - 60) :]
    most = max((rate for rate in rates if rate), default=0.0)
    line = [(f"{frame.hit_rate:.1%} of all tokens", "")]
    if most:
        sparks = "".join(" " if rate is None else _SPARKS[round(7 * rate / most)] for rate in rates)
        line += [(f", {rates[-1] or 0:.1%} now {sparks}", "green"), (f" up to {most:.1%}", "dim")]
    return line


def _draw_words(frame: Frame, width: int) -> list[Line]:
    """Return the other figures that are not 0."""
    words = []
    for name, value in (frame.levels | frame.counters).items():
        if value and name not in (HIT, LOOKED_UP):
            rate = frame.rates.get(name)
            shown = f"{value:.1%}" if name.endswith(("rate", "ratio")) else _show(value)
            words.append(f"{escape_text(name)} {shown}" + (f" {rate:+,.1f}/s" if rate else ""))
    together = "  ".join(word.replace(" ", "\xa0") for word in words)
    return [[(line.replace("\xa0", " "), "")] for line in wrap(together, width)]


def _draw_map(frame: Frame, width: int) -> list[Line]:
    if frame.map is None:
        return []
    heading = [(f"{'map':{_MIN_NAME}}", "bold"), (f"cells of {frame.map.blocks_per_cell:,} blocks,", "")]
    heading += [(f" {sign} {meaning}", style) for sign, (style, meaning) in _SIGNS.items()]
    signs = "".join(map(_find_sign, frame.map.cells))
    rows = [groupby(signs[first : first + width]) for first in range(0, len(signs), width)]
    return [heading] + [[("".join(run), _SIGNS[sign][0]) for sign, run in row] for row in rows]


def _find_sign(cell: MapCell) -> str:
    if cell.immovable:
        return "P"
    if cell.in_use:
        return "+" if cell.cached or cell.empty else "#"
    return "=" if cell.cached >= cell.empty else "_"


def _draw_table(
    title: str, rows: list[dict[str, Any]], choices: Choices, width: int, height: int
) -> list[Line]:
    """Return the rows that pass the filter under a heading.

    Columns without a value are left out, and the last ones if the first one has no room beside them.
    """
    first, *others = [name for at, name in enumerate(rows[0]) if not at or any(row[name] for row in rows)]
    numbers = [name for name in others if any(isinstance(row[name], int | float) for row in rows)]
    order = numbers[(choices.column - 1) % len(numbers)] if choices.column and numbers else None
    if order is not None:
        rows = sorted(rows, key=lambda row: -(row[order] or 0))
    rows = [row for row in rows if choices.filter in str(row[first])][: max(0, height - 1)]
    columns = [[title, *(escape_text(str(row[first])) for row in rows)]]
    for name in others:
        heading = name.removeprefix("num_").replace("_", " ") + "↓" * (name == order)
        columns.append([heading, *(_show(row[name]) for row in rows)])
    size, *sizes = (max(map(cell_len, column)) for column in columns)
    while sizes and min(size, width // 2) > width - sum(sizes) - len(_GAP) * len(sizes):
        sizes.pop()
    size = max(_MIN_NAME, min(size, width - sum(sizes) - len(_GAP) * len(sizes)))
    lines: list[Line] = []
    for name, *cells in zip(*columns, strict=True):
        text = _GAP.join([set_cell_size(name, size), *map(str.rjust, cells, sizes)])
        lines.append([(text, "" if lines else "bold")])
    return lines[: max(0, height)]


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "yes" if value else ""
    if isinstance(value, str):
        return escape_text(value)
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
