"""Options that commands share besides settings: capacities, the model, the number of processes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from kv_pool.cli.setting_options import declare
from kv_pool.errors import InvalidArgumentError
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
from kv_pool.replay.settings import ReplaySettings, find_block_size

MODEL_PANEL = "Model, for --memory and for the time of copies"

Publish = declare(str | None, PUBLISH)
PublishReplay = declare(str | None, PUBLISH_REPLAY)
PublishConfig = declare(str | None, PUBLISH_CONFIG)
Jobs = Annotated[int, typer.Option(help="Processes; 0 for one per core.", min=0)]


@dataclass(frozen=True)
class ModelOptions:
    """The model whose blocks fill the memory: its name, or its dimensions."""

    model: Annotated[
        str | None,
        Option(f"The path of a model's config.json, or one of: {', '.join(MODELS)}.", panel=MODEL_PANEL),
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
            "Capacity in blocks, the null block not counted: 10k; except for a replay also a list such as "
            f"{RANGE_FORMAT}.",
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
