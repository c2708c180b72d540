"""Options that sub-commands share, and the settings they make."""

from typing import Annotated

import typer

from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.capacity import ModelKV, count_blocks, find_model, parse_memory
from kv_pool.replay.replay_request import CONVENTIONS
from kv_pool.replay.simulator import CLOCKS, DEFAULT_BLOCK_SIZE
from kv_pool.replay.trace import BUNDLED_TRACES, Trace

_ENGINE = "The engine the trace clock imagines"
_MODEL = "Capacity as memory"
EVENTS_PANEL = "Events"

TraceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help=f"A trace file (.jsonl, .gz, .xz, .zst), or one of: {', '.join(BUNDLED_TRACES)}.",
    ),
]
BlockSize = Annotated[
    int | None, typer.Option(help="Tokens per pool block. Default: the trace's own.", min=1)
]
Convention = Annotated[
    str, typer.Option(help=f"What counts as a block that can be hit: {', '.join(CONVENTIONS)}.")
]
Clock = Annotated[
    str,
    typer.Option(
        help=f"{' or '.join(CLOCKS)}: requests one at a time, or arriving by timestamp and overlapping."
    ),
]
PrefillRate = Annotated[
    float, typer.Option(help="Prompt tokens per second, one prompt at a time.", rich_help_panel=_ENGINE)
]
DecodeRate = Annotated[
    float, typer.Option(help="Tokens per second that each request generates.", rich_help_panel=_ENGINE)
]
MaxRunning = Annotated[int, typer.Option(help="Requests that run at once.", min=1, rich_help_panel=_ENGINE)]
Speedup = Annotated[float, typer.Option(help="Arrivals come so many times faster.", rich_help_panel=_ENGINE)]
Limit = Annotated[int | None, typer.Option(help="Only so many requests from the start.", min=1)]
TraceBlockSize = Annotated[
    int | None, typer.Option(help="Tokens per hash id. Default: inferred from the trace.", min=1)
]
TimestampUnit = Annotated[str, typer.Option(help="Unit of the trace's timestamps: ms or s.")]
SkipBroken = Annotated[
    bool, typer.Option("--skip-broken", help="Pass over broken lines and count them, instead of stopping.")
]
Seed = Annotated[str, typer.Option(help="Seed of the block hashes, for traces of token ids.")]
Runs = Annotated[bool, typer.Option("--runs", help="Prefer runs of consecutive block ids.")]
JsonFile = Annotated[
    str | None, typer.Option("--json", help="Write everything, with provenance, to this file.")
]
Publish = Annotated[
    str | None,
    typer.Option(
        metavar="ENDPOINT",
        help="Send the pool's events from here, such as tcp://127.0.0.1:5557, port 0 for a free one; "
        "kv-pool events shows them. Token ids are those of the trace; where it has hash ids instead, an id "
        "stands for each of its tokens, and 0 for generated ones.",
        rich_help_panel=EVENTS_PANEL,
    ),
]
PublishReplay = Annotated[
    str | None,
    typer.Option(
        metavar="ENDPOINT",
        help="Where readers ask for events that they missed, such as tcp://127.0.0.1:5558.",
        rich_help_panel=EVENTS_PANEL,
    ),
]
PublishConfig = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A TOML file whose table [publisher] says how to send: topic, heartbeat_s, hwm, CURVE keys and "
        "whatever else PublisherConfig has; the two options above win over its endpoints.",
        rich_help_panel=EVENTS_PANEL,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(help="Memory for KV, such as 40GiB; with --model or dimensions.", rich_help_panel=_MODEL),
]
Model = Annotated[
    str | None, typer.Option(help="A well-known model, such as llama-3-8b.", rich_help_panel=_MODEL)
]
NumLayers = Annotated[int, typer.Option(help="Instead of --model.", min=0, rich_help_panel=_MODEL)]
NumKVHeads = Annotated[int, typer.Option(help="Instead of --model.", min=0, rich_help_panel=_MODEL)]
HeadSize = Annotated[int, typer.Option(help="Instead of --model.", min=0, rich_help_panel=_MODEL)]
DtypeBytes = Annotated[int, typer.Option(help="Bytes per KV element.", min=1, rich_help_panel=_MODEL)]


def blocks_from_memory(
    trace: Trace,
    block_size: int | None,
    memory: str,
    model: str | None,
    num_layers: int,
    num_kv_heads: int,
    head_size: int,
    dtype_bytes: int,
) -> int:
    """Capacity in blocks for `--memory`. Raises InvalidArgumentError."""
    dimensions = (num_layers, num_kv_heads, head_size)
    if (model is None) == (not any(dimensions)):
        raise InvalidArgumentError(
            "--memory needs either --model, or --num-layers, --num-kv-heads and --head-size"
        )
    kv = ModelKV(*dimensions, dtype_bytes=dtype_bytes) if model is None else find_model(model)
    if model is not None and dtype_bytes != kv.dtype_bytes:
        kv = ModelKV(kv.num_layers, kv.num_kv_heads, kv.head_size, kv.latent_size, dtype_bytes)
    return count_blocks(parse_memory(memory), block_size or trace.block_size or DEFAULT_BLOCK_SIZE, kv)
