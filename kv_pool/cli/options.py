"""Options that commands share besides settings: capacities, the model, and the files of results."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import typer

from kv_pool.cli.console import print_error, print_report
from kv_pool.cli.foreign_text import escape_json, escape_text
from kv_pool.drawing import check_can_draw
from kv_pool.errors import InvalidArgumentError, TraceError
from kv_pool.lab.capacity import MODELS, ModelKV, count_blocks, find_model
from kv_pool.lab.groups import parse_groups
from kv_pool.lab.report import encode_json, write_csv_rows, write_json
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.tables import Report
from kv_pool.lab.trace_writer import check_can_write
from kv_pool.option import Option, setting
from kv_pool.quantities import RANGE_FORMAT, parse_count, parse_memory, parse_range

MODEL_PANEL = "Model, for --memory and for the time of copies"

JOBS = Option("Processes; 0 for one per core.", min=0)


@dataclass(frozen=True)
class ModelOptions:
    """The model whose blocks fill the memory: its name, or its dimensions."""

    model: str | None = setting(
        f"The path of a model's config.json, or one of: {', '.join(MODELS)}.",
        default=None,
        panel=MODEL_PANEL,
        known=lambda: MODELS,
    )
    num_layers: int = setting("Number of layers, instead of --model.", default=0, min=0, panel=MODEL_PANEL)
    num_kv_heads: int = setting(
        "Number of KV heads, instead of --model.", default=0, min=0, panel=MODEL_PANEL
    )
    head_size: int = setting("Elements per head, instead of --model.", default=0, min=0, panel=MODEL_PANEL)
    dtype_bytes: int = setting("Bytes per KV element.", default=2, min=1, panel=MODEL_PANEL)

    def find_kv(self) -> ModelKV | None:
        """Return the model, or None if there is none. Raises InvalidArgumentError if the options name two."""
        dimensions = (self.num_layers, self.num_kv_heads, self.head_size)
        if self.model is None:
            return ModelKV(*dimensions, dtype_bytes=self.dtype_bytes) if any(dimensions) else None
        if any(dimensions):
            raise InvalidArgumentError(
                "pass either --model, or --num-layers, --num-kv-heads and --head-size, not both"
            )
        return replace(find_model(self.model), dtype_bytes=self.dtype_bytes)

    def require_kv(self, needed_by: str) -> ModelKV:
        """Return the model. Raises InvalidArgumentError if there is none; its message says what needs one."""
        kv = self.find_kv()
        if kv is None:
            raise InvalidArgumentError(
                f"{needed_by} needs either --model, or --num-layers, --num-kv-heads and --head-size"
            )
        return kv


@dataclass(frozen=True)
class CapacityOptions(ModelOptions):
    """Capacities in blocks, or as memory for the model."""

    blocks: str | None = setting(
        "Capacity in blocks, the null block not counted: 10k; except for a replay also a list such as "
        f"{RANGE_FORMAT}.",
        default=None,
        metavar="LIST",
    )
    memory: str | None = setting(
        "Capacity as memory instead, with --model or dimensions: 40GiB; except for a replay also a list such "
        "as 10GiB,40GiB or 10GiB:80GiB:log5.",
        default=None,
        metavar="LIST",
        panel=MODEL_PANEL,
    )

    def find(self, settings: ReplaySettings) -> tuple[ReplaySettings, list[int]]:
        """Return the settings with the first capacity and the bytes of a block, 0 without a model; and all.

        Raises:
            InvalidArgumentError: neither or both are given, or memory without a model, or too little memory;
                also as `find_kv`.
            TraceError: the trace cannot be read.
        """
        kv = self.find_kv()
        trace = settings.open_trace()
        if (self.blocks is None) == (self.memory is None):
            raise InvalidArgumentError("pass the capacity either as --blocks or as --memory")
        block_size = trace.pool_block_size
        num_groups = len(parse_groups(settings.groups, block_size))
        if self.blocks is not None:
            capacities = parse_list("--blocks", self.blocks)
        else:
            of_memory = self.require_kv("--memory")
            sizes = parse_list("--memory", self.memory or "", parse_memory)
            capacities = [count_blocks(size, block_size, of_memory, num_groups) for size in sizes]
        block_bytes = 0 if kv is None else kv.count_block_bytes(block_size, num_groups)
        return replace(settings, num_blocks=capacities[0], block_bytes=block_bytes), capacities


def parse_list(option: str, text: str, parse_one: Callable[[str], int] = parse_count) -> list[int]:
    """Parse a list or range as `parse_range` does; errors name the option."""
    try:
        return parse_range(text, parse_one)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{option}: {error}") from error


@dataclass(frozen=True)
class Outputs:
    """The files of a report. Each is written only if it is asked for."""

    json: str | None = setting(
        "Write the whole report, with settings and provenance, to this file.", default=None, metavar="FILE"
    )
    csv: str | None = setting(
        "Write one row per capacity, in a comparison per policy, too, to this file.",
        default=None,
        metavar="FILE",
    )
    png: str | None = setting(
        "Draw the hit rates to this file (.png, .svg, .pdf); of a replay, those of its breakdowns.",
        default=None,
        metavar="FILE",
    )

    def check(self) -> None:
        """Raise KVPoolError if a file cannot be written, or two have one path. Call this before the work."""
        paths = [os.path.abspath(path) for path in (self.json, self.csv, self.png) if path is not None]
        if len(set(paths)) < len(paths):
            raise InvalidArgumentError(
                "two of --json, --csv and --png have the same path; pass different ones"
            )
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
        try:  # the files first: the reader of the output, such as `head`, may be gone
            if self.csv is not None:
                write_csv_rows(self.csv, report.records)
            if self.png is not None:
                draw(self.png)
        finally:
            print_report(report)
        if self.png is not None:
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
