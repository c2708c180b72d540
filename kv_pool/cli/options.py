"""Options that commands share besides settings: capacities, the model, tiers, and the files of results."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kv_pool.cli.foreign_text import escape_json
from kv_pool.cli.setting_options import declare
from kv_pool.errors import InvalidArgumentError, TraceError
from kv_pool.replay.capacity import (
    MODELS,
    RANGE_FORMAT,
    ModelKV,
    count_blocks,
    find_model,
    parse_count,
    parse_memory,
    parse_range,
)
from kv_pool.replay.event_feed import PUBLISH, PUBLISH_CONFIG, PUBLISH_REPLAY
from kv_pool.replay.groups import parse_groups
from kv_pool.replay.option import Option
from kv_pool.replay.pictures.figure import check_can_draw
from kv_pool.replay.report import encode_json, write_json
from kv_pool.replay.settings import ReplaySettings, find_block_size
from kv_pool.replay.trace_writer import check_can_write

MODEL_PANEL = "Model, for --memory and for the time of copies"

Publish = declare(str | None, PUBLISH)
PublishReplay = declare(str | None, PUBLISH_REPLAY)
PublishConfig = declare(str | None, PUBLISH_CONFIG)
JsonFile = Annotated[
    str | None, typer.Option("--json", help="Write the whole report, with provenance, to this file.")
]
Jobs = Annotated[int, typer.Option(help="Processes; 0 for one per core.", min=0)]


def declare_picture(what: str, name: str) -> Any:
    """Return `--png`, the file for a picture, whose default is the first unused file like `name`.png."""
    return typer.Option(
        help=f"File for the {what}. Default: {name}.png, or {name}-2.png and so on if it exists."
    )


@dataclass(frozen=True)
class ModelOptions:
    """The model whose blocks fill the memory: its name, or its dimensions."""

    model: Annotated[
        str | None,
        Option(
            f"The path of a model's config.json, or one of: {', '.join(MODELS)}.",
            panel=MODEL_PANEL,
            known=lambda: MODELS,
        ),
    ] = None
    num_layers: Annotated[int, Option("Number of layers, instead of --model.", min=0, panel=MODEL_PANEL)] = 0
    num_kv_heads: Annotated[
        int, Option("Number of KV heads, instead of --model.", min=0, panel=MODEL_PANEL)
    ] = 0
    head_size: Annotated[int, Option("Elements per head, instead of --model.", min=0, panel=MODEL_PANEL)] = 0
    dtype_bytes: Annotated[int, Option("Bytes per KV element.", min=1, panel=MODEL_PANEL)] = 2

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

    blocks: Annotated[
        str | None,
        Option(
            f"Capacity in blocks, the null block not counted; of a replay one, else: {RANGE_FORMAT}.",
            metavar="LIST",
        ),
    ] = None
    memory: Annotated[
        str | None,
        Option(
            "Capacity as memory instead, with --model or dimensions: 40GiB; except for a replay also a list "
            "such as 10GiB,40GiB or 10GiB:80GiB:log5.",
            metavar="LIST",
            panel=MODEL_PANEL,
        ),
    ] = None

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
        block_size = find_block_size(settings.block_size, trace)
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


def write_report(report: object, path: str | None) -> None:
    """Write a report to a file as JSON, or print it on standard output if the file cannot be written.

    No-op without a path.

    Raises:
        TraceError: the file was not written.
    """
    if path is None:
        return
    try:
        write_json(report, path)
    except TraceError as error:
        print(escape_json(encode_json(report).decode()))
        raise TraceError(f"{error}; the report is on standard output instead") from error


def choose_files(default_picture: str, picture: str | None, *others: str | None) -> str:
    """Return the path of the picture: `picture`, or for None the first unused one like `default_picture`.

    Call this before the work, whose results these files take.

    Raises:
        KVPoolError: the picture cannot be drawn, or one of the `others` that are not None cannot be written.
    """
    if picture is None:
        picture = _find_unused(default_picture)
    check_can_draw(picture)
    for path in others:
        if path is not None:
            check_can_write(path)
    return picture


def _find_unused(path: str) -> str:
    """Return `path`, or the first unused path with -2, -3 and so on before its suffix."""
    first = Path(path)
    found, number = first, 1
    while found.exists():
        number += 1
        found = first.with_stem(f"{first.stem}-{number}")
    return str(found)
