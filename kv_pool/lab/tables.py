"""`Report`: a result of the lab as tables, sentences and rows, which one renderer for each form takes."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

show_count: Callable[[float], str] = "{:,}".format
show_share: Callable[[float], str] = "{:.2%}".format
show_factor: Callable[[float], str] = "{:.2f}".format

REMARK = "remark"
"""The heading of the remarks in a table of facts; it is not shown."""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: its heading, with the unit unless `show` appends it to each value.
        find: the field of a row's object, dotted if it is nested, or a function of the object. None gives an
            empty cell.
        show: formats a value, which decides its digits.
    """

    title: str
    find: str | Callable[[Any], Any]
    show: Callable[[Any], object] = show_count

    def make_cell(self, row: object) -> object:
        """Return the text of a row's cell, or None."""
        value = attrgetter(self.find)(row) if isinstance(self.find, str) else self.find(row)
        return None if value is None else self.show(value)


class Fact(NamedTuple):
    """A row of a table without headings: a name, its value, and a remark."""

    name: str
    value: str
    remark: str = ""


@dataclass(frozen=True)
class ReportTable:
    """A table as text, which the terminal's renderer lays out.

    Attributes:
        titles: the headings.
        rows: the cells of each row, None for an empty one; None for a line between two rows.
        texts: headings of the columns of words, which are aligned to the left and may fold. The others have
            numbers.
        title, caption: above and below the table.
        num_keys: columns at the start that name a row; a table too wide for a terminal repeats them.
        has_bars: whether the last column draws what another one says, and may be left out.
        has_titles: whether the headings are shown.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[object] | None]
    texts: Container[str] = ("",)
    title: str = ""
    caption: str = ""
    num_keys: int = 1
    has_bars: bool = False
    has_titles: bool = True


def draw_bar(share: float) -> str:
    """Return a bar for a share, of 16 characters at most."""
    return "█" * round(16 * share)


def make_table(columns: Sequence[Column], rows: Iterable[object | None], **attributes: Any) -> ReportTable:
    """Return a table with a row for each object; None for a line between two rows.

    Args:
        attributes: others of `ReportTable`.
    """
    cells = [None if row is None else [column.make_cell(row) for column in columns] for row in rows]
    return ReportTable([column.title for column in columns], cells, **attributes)


def make_facts(title: str, facts: Iterable[Fact | None], caption: str = "") -> ReportTable:
    """Return a table without headings, with a row for each fact; None for a line between two rows."""
    return ReportTable(
        ("", "value", REMARK), [*facts], ("", REMARK), title, caption, num_keys=2, has_titles=False
    )


@dataclass(frozen=True)
class Report:
    """A result of the lab, as every command prints and writes it.

    Attributes:
        result: a struct, or a list of them, with settings and provenance; its JSON has a schema.
        shown: tables and sentences, in the order in which a terminal shows them.
        errors: a line for each run that failed, and each result that cannot be.
        records: the rows of a CSV file, with the field names of the JSON.
    """

    result: object
    shown: Sequence[ReportTable | str]
    errors: Sequence[str] = ()
    records: Sequence[Mapping[str, object]] = ()


def list_fields(struct: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the names and values of a struct's fields, those of nested structs as `outer_inner`."""
    for name, value in msgspec.structs.asdict(struct).items():
        if isinstance(value, msgspec.Struct):
            yield from list_fields(value, f"{prefix}{name}_")
        else:
            yield prefix + name, value


def make_record(row: object, block_bytes: int | None, **first: object) -> dict[str, object]:
    """Return a row of a CSV file: `first`, and the fields of a struct, with its `num_blocks` in bytes, too.

    Args:
        block_bytes: 0 if the bytes are not known; None for no such column.
    """
    record = dict(first)
    for name, value in list_fields(row):
        record[name] = value
        if name == "num_blocks" and block_bytes is not None and isinstance(value, int):
            record["bytes"] = value * block_bytes or None
    return record


def describe_broken(broken_lines: int, first_broken: str | None) -> list[str]:
    """Return a sentence about the skipped lines of a trace, if there are any."""
    return [f"broken lines: {broken_lines:,}; {first_broken}"] * bool(broken_lines)
