"""Printing for every command: any encoding, closed pipes, tables, sizes, errors, progress, repetition."""

import codecs
import os
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec
from rich.console import Console
from rich.live import Live
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kv_pool.cli.foreign_text import escape_json, escape_lines, escape_text, make_cell
from kv_pool.replay.report import OnProgress

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
    """Print one message on standard error, escaped: it may contain text of another process."""
    print(f"error: {escape_lines(str(error))}", file=sys.stderr)


def print_note(note: str) -> None:
    """Print one line on standard error that is no error."""
    print(f"note: {escape_lines(note)}", file=sys.stderr)


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


def new_table(
    titles: Iterable[str],
    rows: Iterable[Iterable[object] | None],
    *,
    right: Container[str] = (),
    folds: Container[str] = (),
    **options: Any,
) -> Table:
    """Return a table with these columns and rows.

    Args:
        rows: cells, which are escaped unless they are `Text`, and empty if they are None; None for a line
            between two rows.
        right: titles of columns that are aligned to the right.
        folds: titles of columns whose cells may fold; cells of the others stay whole.
        options: of `Table`.
    """
    table = Table(**options)
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", no_wrap=title not in folds)
    _add_rows(table, rows)
    return table


Column = tuple[str, Callable[[Any], object]]
"""A title, and a function that returns the cell of a row's object; None for an empty cell."""


def make_table(
    columns: Sequence[Column], rows: Iterable[object | None], *, left: Container[str] = ("",), **options: Any
) -> Table:
    """Return a table with a row for each object; None for a line between two rows.

    Args:
        left: titles of columns that are aligned to the left.
        options: of `Table`.
    """
    titles = [title for title, _ in columns]
    cells = (None if row is None else [find(row) for _, find in columns] for row in rows)
    return new_table(titles, cells, right=[title for title in titles if title not in left], **options)


Fact = tuple[str, str, str]
"""A name, its number, a remark."""


def new_facts_table(title: str, facts: Iterable[Fact | None], caption: str | None = None) -> Table:
    """Return a table without header, with a row for each fact; None for a line between two rows.

    Args:
        title, caption: without control characters: `escape_text` makes foreign text so.
    """
    table = Table(title=Text(title), caption=caption and Text(caption), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    _add_rows(table, facts)
    return table


def _add_rows(table: Table, rows: Iterable[Iterable[object] | None]) -> None:
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*(cell if isinstance(cell, Text | None) else make_cell(str(cell)) for cell in row))


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table with every cell of its `no_wrap` columns whole, however narrow the terminal is.

    Other columns fold at words on a terminal; nothing folds in a pipe or a file.
    """
    console = console or Console()
    measured = measure_table(table, console)
    console.width = max(console.width, measured.minimum) if console.is_terminal else measured.maximum
    console.print(table)


def measure_table(table: Table, console: Console) -> Measurement:
    """Return the least width of a table with `no_wrap` columns whole, and the width without folding."""
    options = console.options.update_width(_UNLIMITED_WIDTH)
    for column in table.columns:
        if column.no_wrap:
            cells = [column.header, *column.cells] if table.show_header else column.cells
            column.min_width = max(
                (Measurement.get(console, options, one).maximum for one in cells), default=0
            )
    return Measurement.get(console, options, table)


def fit_table(table: Table, console: Console) -> Table:
    """Return a table, on a narrow terminal without the last columns, so that each cell is whole."""
    while (
        console.is_terminal
        and len(table.columns) > 1
        and measure_table(table, console).minimum > console.width
    ):
        table.columns.pop()
    return table


def refresh_forever(
    look: Callable[[], Table | Text], console: Console, sleep: Callable[[float], object] = time.sleep
) -> NoReturn:
    """Show what `look` returns, repeatedly: in place on a terminal, else one print after the other."""
    if console.is_terminal:
        with Live(look(), console=console, auto_refresh=False) as live:
            while True:
                sleep(SECONDS_BETWEEN_LOOKS)
                live.update(look(), refresh=True)
    while True:
        shown = look()
        if isinstance(shown, Table):
            print_table(shown, console)
        else:
            console.print(shown, soft_wrap=True)
        console.file.flush()
        sleep(SECONDS_BETWEEN_LOOKS)


@contextmanager
def show_progress(doing: str) -> Iterator[OnProgress]:
    """Show a bar on standard error in a `with` block; nothing if that is not a terminal.

    Yields:
        A function that updates the bar.
    """
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[now]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
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
