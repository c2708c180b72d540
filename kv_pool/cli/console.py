"""Printing for every command: any encoding, closed pipes, tables, sizes, errors, progress, repetition."""

import codecs
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from kv_pool.cli.foreign_text import MAX_CHARS, escape_json, escape_text, make_cell
from kv_pool.cli.logs import print_record
from kv_pool.lab.report import OnProgress
from kv_pool.lab.tables import REMARK, Report, ReportTable

SECONDS_BETWEEN_LOOKS = 0.5
"""Slow enough to read. Each refresh costs the pool some microseconds."""

_UNLIMITED_WIDTH = 10_000
_SPELLINGS = {"█": "#", "→": "->", "µ": "u", "…": "...", "×": "x", "■": "#", "·": "."}


def prepare_streams() -> None:
    """Make standard output and error accept any text: characters that the encoding lacks are replaced."""
    codecs.register_error("kv_pool.spell", _spell)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="kv_pool.spell")


def end_for_closed_output() -> NoReturn:
    """Exit silently with status 141, as SIGPIPE would: the reader of the output, such as `head`, is gone."""
    # Otherwise the interpreter flushes the remaining output at exit, and reports the failure.
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
    sys.exit(128 + 13)


def print_error(error: object) -> None:
    """Print one message on standard error, as the log is: it may contain text of another process."""
    print_record(logging.ERROR, str(error))


def print_note(note: str) -> None:
    """Print one line on standard error that is no error."""
    print_record(logging.INFO, note)


def print_json(result: object) -> None:
    """Print one line of JSON, for programs; characters that do not print are escaped."""
    print(encode_json_line(result))


def encode_json_line(result: object) -> str:
    """Return one line of JSON in which characters that do not print are escaped."""
    return escape_json(msgspec.json.encode(result).decode())


def describe_bytes(num_bytes: float) -> str:
    """Return a size with a decimal unit, such as `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def print_report(report: Report, json: bool = False, **options: Any) -> None:
    """Print the tables and sentences of a report, or its result as one line of JSON.

    Args:
        options: of rich's `Table`.
    """
    if json:
        print_json(report.result)
        return
    for part in report.shown:
        if isinstance(part, ReportTable):
            console = Console()  # a table that is wider makes its console wider for good
            print_parts(lay_out(part, console, **options), console)
        else:
            print(escape_text(part, 10 * MAX_CHARS))


def print_parts(parts: Iterable[RenderableType], console: Console) -> None:
    """Print tables or texts one below the other, each as wide as it is. The console stays that wide."""
    for part in parts:
        console.width = max(console.width, _measure(part, console).maximum)
        console.print(part)


def lay_out(table: ReportTable, console: Console, **options: Any) -> list[RenderableType]:
    """Return a table in the fewest parts that fit on the console, to be printed one below the other.

    A terminal that is too narrow shows no bars; headings and words fold there. If that is not enough, the
    last columns follow in further parts, each behind the columns that name the rows. Numbers and single words
    stay whole. An empty column without a heading is left out. If the columns that name the rows take more
    than half of the terminal, all columns are in one part, which may be wider than it.

    Args:
        options: of rich's `Table`.
    """
    columns = [_Column(table, number, console) for number in range(len(table.titles))]
    columns = [column for column in columns if column.most]
    width = console.width if console.is_terminal else _UNLIMITED_WIDTH

    def find_room(part: Sequence[_Column]) -> int:
        for column in part:
            column.width = column.least
        return width - _measure(_begin(table, part, options), console).maximum

    if table.has_bars and find_room(columns) < sum(column.most - column.least for column in columns):
        columns = [column for column in columns if column.title]
    keys = columns[: table.num_keys]
    may_repeat = find_room(keys) >= width // 2
    parts = [keys]
    for column in columns[table.num_keys :]:
        wider = [*parts[-1], column]
        if parts[-1] == keys or not may_repeat or find_room(wider) >= 0:
            parts[-1] = wider
        else:
            parts.append([*keys, column])
    built = []
    for part in parts:
        room = max(0, find_room(part))
        for column in sorted(part, key=lambda column: not column.is_text):  # words before headings
            column.width = min(column.most, column.least + room)
            room -= column.width - column.least
        built.append(_begin(table, part, options))
        _add_rows(built[-1], table, part)
    built[0].title = make_cell(table.title) if table.title else None
    caption = make_cell(table.caption, "table.caption")
    if len(built) > 1 and caption:  # it may be wider than the last part
        return [*built, caption]
    built[-1].caption = caption if table.caption else None
    return [*built]


class _Column:
    """A column on a console.

    Attributes:
        cells: escaped, without the heading.
        most, least: its width if nothing folds, and if its heading and its words fold.
        width: the width that it gets.
    """

    def __init__(self, table: ReportTable, number: int, console: Console) -> None:
        self.title = table.titles[number]
        self.is_text = self.title in table.texts
        self.cells = [_make_cell(row[number]) for row in table.rows if row is not None]
        measured = [_measure(cell, console) for cell in self.cells]
        heading = _measure(make_cell(self.title * table.has_titles), console)
        self.most = self.width = max(heading.maximum, *(cell.maximum for cell in measured), 0)
        folded = (cell.minimum if self.is_text else cell.maximum for cell in measured)
        self.least = max(heading.minimum, *folded, 0)


def _begin(table: ReportTable, columns: Sequence[_Column], options: dict[str, Any]) -> Table:
    """Return a part of a table, without rows."""
    built = Table(show_header=table.has_titles, **options)
    for column in columns:
        style = "dim" if column.title == REMARK else "" if column.title or column != columns[0] else "bold"
        justify: JustifyMethod = "left" if column.is_text else "right"
        built.add_column(make_cell(column.title), style=style, width=column.width, justify=justify)
    return built


def _add_rows(part: Table, table: ReportTable, columns: Sequence[_Column]) -> None:
    cells = zip(*(column.cells for column in columns), strict=True)
    for row in table.rows:
        if row is None:
            part.add_section()
        else:
            part.add_row(*next(cells))


def _make_cell(cell: object) -> Text:
    return cell if isinstance(cell, Text) else make_cell("" if cell is None else str(cell))


def _measure(renderable: RenderableType, console: Console) -> Measurement:
    return Measurement.get(console, console.options.update_width(_UNLIMITED_WIDTH), renderable)


def refresh_forever(look: Callable[[], Sequence[RenderableType]], console: Console) -> NoReturn:
    """Show what `look` returns, in parts, repeatedly: in place on a terminal, else one after another."""
    if console.is_terminal:
        with Live(Group(*look()), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(SECONDS_BETWEEN_LOOKS)
                live.update(Group(*look()), refresh=True)
    while True:
        print_parts(look(), console)
        console.file.flush()
        time.sleep(SECONDS_BETWEEN_LOOKS)


@contextmanager
def show_progress(doing: str) -> Iterator[OnProgress]:
    """Show a bar on standard error in a `with` block; nothing if that is not a terminal.

    Yields:
        A function that updates the bar.
    """
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
        console=Console(stderr=True),
        expand=True,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    task = bar.add_task(escape_text(doing), total=None, now="")
    with bar:
        yield lambda now, share: bar.update(
            task, total=None if share is None else 1.0, completed=share, now=escape_text(now)[:80]
        )


def _spell(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_spell_char(one) for one in error.object[error.start : error.end]), error.end


def _spell_char(char: str) -> str:
    if "\u2800" <= char <= "\u28ff":  # rich's spinner
        return "*"
    return _SPELLINGS.get(char) or char.encode("ascii", "backslashreplace").decode()
