"""`Outputs`: the files of a command's results, and what it prints: one way for every report of the lab."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer

from kv_pool.cli.console import print_error, print_report
from kv_pool.cli.foreign_text import escape_json, escape_text
from kv_pool.errors import TraceError
from kv_pool.replay.option import Option
from kv_pool.replay.pictures.figure import check_can_draw
from kv_pool.replay.report import encode_json, write_csv_rows, write_json
from kv_pool.replay.tables import Report
from kv_pool.replay.trace_writer import check_can_write


@dataclass(frozen=True)
class Outputs:
    """The files of a report. Each is written only if it is asked for."""

    json: Annotated[
        str | None,
        Option("Write the whole report, with settings and provenance, to this file.", metavar="FILE"),
    ] = None
    csv: Annotated[
        str | None, Option("Write one row per capacity, and policy, to this file.", metavar="FILE")
    ] = None
    png: Annotated[
        str | None,
        Option(
            "Draw the hit rates to this file (.png, .svg, .pdf); of a replay, those that --by lists.",
            metavar="FILE",
        ),
    ] = None

    def check(self) -> None:
        """Raise KVPoolError if a file cannot be written. Call this before the work."""
        if self.png is not None:
            check_can_draw(self.png)
        for path in (self.json, self.csv):
            if path is not None:
                check_can_write(path)

    def write(self, report: Report, draw: Callable[[str], None]) -> None:
        """Write the files of a report, and print it. JSON that cannot be written is printed instead.

        Args:
            draw: draws the report's picture to a path.
        Raises:
            TraceError: a file was not written.
            typer.Exit: status 2: the report has errors, which are printed.
        """
        self._write_json(report.result)
        if self.csv is not None:
            write_csv_rows(self.csv, report.records)
        print_report(report)
        if self.png is not None:
            draw(self.png)
            print(f"picture: {escape_text(self.png)}")
        sys.stdout.flush()
        for line in report.errors:
            print_error(line)
        if report.errors:
            raise typer.Exit(2)

    def _write_json(self, result: object) -> None:
        if self.json is None:
            return
        try:
            write_json(result, self.json)
        except TraceError as error:
            print(escape_json(encode_json(result).decode()))
            raise TraceError(f"{error}; the report is on standard output instead") from error
