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
from kv_pool.cli.top_sources import EVICTED, HIT, LOOKED_UP, Bar, Frame
from kv_pool.reports.pool_view import MapCell

Line = list[tuple[str, str]]
"""Texts with their rich styles."""

KEYS = "q quit  space pause  s sort  / filter"
_BAR_CELLS = 24
_MIN_NAME = 8
_SPARKS = "▁▂▃▄▅▆▇█"
_MAX_SPARKS = 60
_SIGNS = (
    ("_", "bright_black", "empty"),
    ("=", "yellow", "cached"),
    ("+", "cyan", "partly"),
    ("#", "blue", "in use"),
    ("P", "red", "held in place"),
)
"""Those of `kv-pool layout`, and one for a cell that is partly in use."""


@dataclass
class Choices:
    """What was chosen with keys.

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
    clock = time.strftime("%H:%M:%S", time.localtime(frame.time_s))
    state = f"{'paused ' * choices.is_paused}{clock}"
    title = set_cell_size(f"kv-pool top  {escape_text(frame.source)}", max(0, width - len(state) - 1))
    lines: list[Line] = [[(f"{title} {state}", "bold reverse")]]
    if frame.trouble:
        lines.append([(f"not connected: {escape_text(frame.trouble)}", "bold red")])
    size = max((len(bar.name) + 1 for bar in frame.bars), default=0)
    lines += [_draw_bar(bar, max(_MIN_NAME, size)) for bar in frame.bars]
    lines += _draw_hits(frame, width) + _draw_evictions(frame)
    words = [
        f"{name.removeprefix('num_')} {f'{level:.1%}' if name.endswith('rate') else _show(level)}"
        for name, level in frame.levels.items()
        if level
    ]
    words += [
        f"{name} {rate:,.1f}/s"
        for name, rate in frame.rates.items()
        if rate and name not in (HIT, LOOKED_UP) and not name.startswith(EVICTED)
    ]
    together = "  ".join(word.replace(" ", "\xa0").replace("_", "\xa0") for word in map(escape_text, words))
    lines += [[(line.replace("\xa0", " "), "")] for line in wrap(together, width)]
    if frame.map is not None:
        blocks = f"cells of {frame.map.blocks_per_cell:,} blocks,"
        lines.append([(f"{'map':{_MIN_NAME}}", "bold"), (blocks, "")])
        lines[-1] += [(f" {sign} {kind}", style) for sign, style, kind in _SIGNS]
        signs = list(map(_find_sign, frame.map.cells))
        for first in range(0, len(signs), width):
            runs = groupby(signs[first : first + width])
            lines.append([(sign * len(list(run)), style) for (sign, style, _), run in runs])
    end: list[Line] = [[(f"not here: {frame.absent}", "dim")]] if frame.absent else []
    if keys:
        typed = f"  / {escape_text(choices.filter)}{'_' * choices.is_typing}"
        end.append([(keys, "dim"), (typed if choices.filter or choices.is_typing else "", "bold")])
    tables = {title: rows for title, rows in frame.tables.items() if rows}
    for left, (title, rows) in zip(range(len(tables) - 1, -1, -1), tables.items(), strict=True):
        room = height - len(lines) - len(end)
        lines += _draw_table(title, rows, choices, width, room // 3 if left else room)
    lines = lines[: max(0, height - len(end))]
    return [*lines, *([[]] * (height - len(lines) - len(end)) if keys else []), *end]


def _find_sign(cell: MapCell) -> tuple[str, str, str]:
    if cell.immovable or not cell.in_use:
        return _SIGNS[4 if cell.immovable else cell.cached >= cell.empty]
    return _SIGNS[2 if cell.cached or cell.empty else 3]


def _draw_bar(bar: Bar, size: int) -> Line:
    line: Line = [(f"{escape_text(bar.name):{size}}", "bold")]
    if not bar.total:
        known = {"in use": bar.used, "cached": bar.cached}
        words = [f"{count:,.0f} {bar.unit} {kind}" for kind, count in known.items() if count is not None]
        return [*line, (", ".join(words), "")]
    used, cached = (bar.used or 0) / bar.total, (bar.cached or 0) / bar.total
    num_used = min(_BAR_CELLS, round(_BAR_CELLS * used))
    num_cached = min(_BAR_CELLS - num_used, round(_BAR_CELLS * cached))
    line += [("█" * num_used, "blue"), ("▒" * num_cached, "yellow")]
    line += [("░" * (_BAR_CELLS - num_used - num_cached), "dim"), (f" {used:.1%} in use", "")]
    line += [(f", {cached:.1%} cached", "")] if bar.cached is not None else []
    return [*line, (f", of {bar.total:,.0f} {bar.unit}", "")] if bar.unit else line


def _draw_hits(frame: Frame, width: int) -> list[Line]:
    if frame.hit_rate is None:
        return []
    line: Line = [(f"{'hits':{_MIN_NAME}}", "bold"), (f"{frame.hit_rate:.1%} of all tokens", "")]
    if frame.recent_hit_rate is not None:
        line.append((f", {frame.recent_hit_rate:.1%} now ", "green"))
    most = max((rate for rate in frame.hit_rates if rate), default=0.0)
    if most:
        rates = frame.hit_rates[-max(1, min(_MAX_SPARKS, width - 60)) :]
        line.append(
            ("".join(" " if rate is None else _SPARKS[round(7 * rate / most)] for rate in rates), "green")
        )
        line.append((f" up to {most:.1%}", "dim"))
    return [line]


def _draw_evictions(frame: Frame) -> list[Line]:
    counts = {name[len(EVICTED) :]: n for name, n in frame.counters.items() if name.startswith(EVICTED)}
    if not counts:
        return []
    rate = sum(rate for name, rate in frame.rates.items() if name.startswith(EVICTED))
    causes = ", ".join(f"{escape_text(cause)} {count:,.0f}" for cause, count in counts.items() if count)
    words = [f"{rate:,.1f}/s"] * bool(frame.rates) + [f"{sum(counts.values()):,.0f} so far"]
    return [[(f"{'evicted':{_MIN_NAME}}", "bold"), (", ".join(words) + f": {causes}" * bool(causes), "")]]


def _draw_table(
    title: str, rows: list[dict[str, Any]], choices: Choices, width: int, room: int
) -> list[Line]:
    """Return the rows that pass the filter under a heading; columns without a value are left out."""
    first, *others = [name for name in rows[0] if any(row[name] for row in rows)]
    numbers = [name for name in others if any(isinstance(row[name], int | float) for row in rows)]
    order = numbers[(choices.column - 1) % len(numbers)] if choices.column and numbers else None
    if order is not None:
        rows = sorted(rows, key=lambda row: -(row[order] or 0))
    shown = [row for row in rows if choices.filter in str(row[first])][: max(0, room - 1)]
    heads = [f"{name.removeprefix('num_').replace('_', ' ')}{'↓' * (name == order)}" for name in others]
    cells = [[title, *heads]]
    cells += [[escape_text(str(row[first])), *(_show(row[name]) for name in others)] for row in shown]
    sizes = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    sizes[0] = max(_MIN_NAME, min(sizes[0], width - sum(sizes[1:]) - 2 * len(others)))
    return [
        [
            (set_cell_size(row[0], sizes[0]), "" if number else "bold"),
            *(
                (f"  {cell:>{size}}", "" if number else "bold")
                for cell, size in zip(row[1:], sizes[1:], strict=True)
            ),
        ]
        for number, row in enumerate(cells[: max(0, room)])
    ]


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "yes" if value else ""
    if isinstance(value, int | float):
        return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
    return escape_text(str(value))
