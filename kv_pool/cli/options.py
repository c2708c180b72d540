"""Options that sub-commands share, and the settings they make."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import typer

from kv_pool.errors import InvalidArgumentError
from kv_pool.replay import ranges
from kv_pool.replay.capacity import MODELS, ModelKV, count_blocks, find_model, parse_memory
from kv_pool.replay.groups import FORMAT, parse_groups
from kv_pool.replay.replay_request import CONVENTIONS
from kv_pool.replay.simulator import CLOCKS, PREEMPTIONS, TIER_WRITES, find_block_size
from kv_pool.replay.trace import BUNDLED_TRACES, Trace
from kv_pool.replay.trace_clock import EngineRates

_ENGINE = "The engine the trace clock imagines"
TIERS_PANEL = "Lower tiers, for cached blocks that the pool reuses"
MODEL_PANEL = "The model, for --memory, and where copies take time"
EVENTS_PANEL = "Events"

DEFAULT_COPY_RATE = f"{EngineRates.copy_bytes_per_s / 1e9:.0f}GB"
DEFAULT_DISK_RATE = f"{EngineRates.disk_bytes_per_s / 1e9:.0f}GB"

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
Groups = Annotated[
    str,
    typer.Option(
        help=f"The model's KV cache groups: {FORMAT}. Each has an equal share of the layers, and blocks of "
        "its own from the same pool."
    ),
]
ChunkTokens = Annotated[
    int | None,
    typer.Option(
        help="Prompts are computed in steps of so many tokens, and blocks that left a window are given up in "
        "between. Default: a prompt at once.",
        min=1,
    ),
]
Watermark = Annotated[
    float,
    typer.Option(
        help="Share of the pool that a request which begins leaves free while others run.",
        min=0.0,
        rich_help_panel=_ENGINE,
    ),
]
KeepSessions = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="Keep a conversation's blocks so long for its next turn; for traces with session ids.",
        min=0.0,
    ),
]
KeepPrefix = Annotated[
    int,
    typer.Option(
        metavar="TOKENS",
        help="Evict the first so many tokens of prompts, the system prompt, last of all.",
        min=0,
    ),
]
HostBlocks = Annotated[
    int,
    typer.Option(
        help="Capacity in blocks of a pool in host memory, for preempted requests of the trace clock; with "
        "--model or dimensions. It is other memory than that of --host-tier, which is for cached blocks.",
        min=0,
        rich_help_panel=_ENGINE,
    ),
]
Preempt = Annotated[
    str,
    typer.Option(
        metavar="RULE",
        help=f"{', '.join(PREEMPTIONS)}: whether preempted requests go to the host's pool, as long as it has "
        "room, or are computed anew; cost takes what is faster.",
        rich_help_panel=_ENGINE,
    ),
]
CopyRate = Annotated[
    str,
    typer.Option(
        help="What is copied between device and host in a second, such as 25GB.", rich_help_panel=_ENGINE
    ),
]
HostTier = Annotated[
    int,
    typer.Option(
        metavar="BLOCKS",
        help="Capacity of a tier in host memory: cached blocks go there when the pool takes them anew, and "
        "are read back on a hit. It is other memory than that of --host-blocks, which is for preempted "
        "requests. With the trace clock it needs --model or dimensions.",
        min=0,
        rich_help_panel=TIERS_PANEL,
    ),
]
DiskTier = Annotated[
    int,
    typer.Option(
        metavar="BLOCKS",
        help="Capacity of a tier on disk, below the host's: what that has no more room for goes there.",
        min=0,
        rich_help_panel=TIERS_PANEL,
    ),
]
TierWrite = Annotated[
    str,
    typer.Option(
        metavar="WHEN",
        help=f"{' or '.join(TIER_WRITES)}: blocks go to the first tier when they are taken anew, or as soon "
        "as they are cached.",
        rich_help_panel=TIERS_PANEL,
    ),
]
DiskRate = Annotated[
    str,
    typer.Option(help="What is copied between host and disk in a second.", rich_help_panel=TIERS_PANEL),
]
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
        help="Where readers ask for events that they missed, such as tcp://127.0.0.1:5657.",
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
    typer.Option(
        help="Memory for KV, such as 40GiB; with --model or dimensions.", rich_help_panel=MODEL_PANEL
    ),
]
Model = Annotated[str | None, typer.Option(help=f"One of: {', '.join(MODELS)}.", rich_help_panel=MODEL_PANEL)]
NumLayers = Annotated[int, typer.Option(help="Instead of --model.", min=0, rich_help_panel=MODEL_PANEL)]
NumKVHeads = Annotated[int, typer.Option(help="Instead of --model.", min=0, rich_help_panel=MODEL_PANEL)]
HeadSize = Annotated[int, typer.Option(help="Instead of --model.", min=0, rich_help_panel=MODEL_PANEL)]
DtypeBytes = Annotated[int, typer.Option(help="Bytes per KV element.", min=1, rich_help_panel=MODEL_PANEL)]


def find_kv(
    model: str | None, num_layers: int, num_kv_heads: int, head_size: int, dtype_bytes: int
) -> ModelKV | None:
    """The model that the options tell of, if they do. Raises InvalidArgumentError if they do twice."""
    dimensions = (num_layers, num_kv_heads, head_size)
    if model is None:
        return ModelKV(*dimensions, dtype_bytes=dtype_bytes) if any(dimensions) else None
    if any(dimensions):
        raise InvalidArgumentError(
            "give either --model, or --num-layers, --num-kv-heads and --head-size, not both"
        )
    return replace(find_model(model), dtype_bytes=dtype_bytes)


def find_capacity(
    trace: Trace,
    block_size: int | None,
    blocks: int | None,
    memory: str | None,
    kv: ModelKV | None,
    groups: str,
) -> tuple[int, int]:
    """Blocks of the pool, from `--blocks` or `--memory`, and bytes of each, 0 where no model is given.

    Raises:
        InvalidArgumentError: not one of the two, or memory without a model, or less than it needs.
    """
    given = None if blocks is None else str(blocks)
    (capacity,), block_bytes = find_capacities(trace, block_size, given, memory, kv, groups)
    return capacity, block_bytes


def find_capacities(
    trace: Trace,
    block_size: int | None,
    blocks: str | None,
    memory: str | None,
    kv: ModelKV | None,
    groups: str,
) -> tuple[list[int], int]:
    """As `find_capacity`, of lists and ranges."""
    if (blocks is None) == (memory is None):
        raise InvalidArgumentError("give the capacity either as --blocks or as --memory")
    tokens_per_block = find_block_size(block_size, trace)
    num_groups = len(parse_groups(groups, tokens_per_block))
    if blocks is not None:
        capacities = parse_list("--blocks", blocks)
    elif kv is None:
        raise InvalidArgumentError(
            "--memory needs either --model, or --num-layers, --num-kv-heads and --head-size"
        )
    else:
        sizes = parse_list("--memory", memory or "", parse_memory)
        capacities = [count_blocks(size, tokens_per_block, kv, num_groups) for size in sizes]
    return capacities, 0 if kv is None else kv.count_block_bytes(tokens_per_block, num_groups)


def parse_list(option: str, text: str, parse_one: Callable[[str], int] = ranges.parse_count) -> list[int]:
    """As `ranges.parse_range`, with errors that name the option."""
    try:
        return ranges.parse_range(text, parse_one)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{option}: {error}") from error


def check_tiers(has_tiers: bool, clock: str, kv: ModelKV | None) -> None:
    """Raise InvalidArgumentError where copies to tiers take a time that nothing tells."""
    if has_tiers and clock == "trace" and kv is None:
        raise InvalidArgumentError(
            "with the trace clock --host-tier and --disk-tier need --model or dimensions: a block's bytes "
            "decide how long a copy takes"
        )
