"""`ReplaySettings`: what to replay, and through what; each setting declared once, with its option."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Annotated

from kv_pool.core.block_hash import BlockHasher
from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.capacity import parse_memory
from kv_pool.replay.groups import FORMAT
from kv_pool.replay.option import Option, describe_options, list_options
from kv_pool.replay.replay_request import CONVENTIONS, ReplayRequest
from kv_pool.replay.trace import BUNDLED_TRACES, Trace

CLOCKS = ("instant", "trace")
PREEMPTIONS = ("cost", "swap", "recompute")
"""How a request gives way: as is faster, or always to the host while there is room, or never."""

TIER_WRITES = ("back", "through")

DEFAULT_BLOCK_SIZE = 16
"""Tokens per block for traces of token ids, which have none of their own."""

ENGINE_PANEL = "The engine the trace clock imagines"
TIERS_PANEL = "Lower tiers, for cached blocks that the pool reuses"

TRACE_BLOCK_SIZE = Option("Tokens per hash id. Default: inferred from the trace.", min=1)


def _show_bytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.0f}GB"


@describe_options
@dataclass(frozen=True)
class EngineRates:
    """The engine that the trace clock imagines. Copy rates are of both directions together.

    Attributes:
    """

    prefill_tokens_per_s: Annotated[
        float,
        Option("Prompt tokens per second, one prompt at a time.", name="prefill_rate", panel=ENGINE_PANEL),
    ] = 50_000.0
    decode_tokens_per_s: Annotated[
        float,
        Option("Tokens per second that each request generates.", name="decode_rate", panel=ENGINE_PANEL),
    ] = 30.0
    max_running: Annotated[int, Option("Requests that run at once.", min=1, panel=ENGINE_PANEL)] = 256
    speedup: Annotated[float, Option("Arrivals come so many times faster.", panel=ENGINE_PANEL)] = 1.0
    copy_bytes_per_s: Annotated[
        float,
        Option(
            "What is copied between device and host in a second, such as 25GB.",
            name="copy_rate",
            parse=parse_memory,
            show=_show_bytes,
            panel=ENGINE_PANEL,
        ),
    ] = 25e9
    disk_bytes_per_s: Annotated[
        float,
        Option(
            "What is copied between host and disk in a second.",
            name="disk_rate",
            parse=parse_memory,
            show=_show_bytes,
            panel=TIERS_PANEL,
        ),
    ] = 5e9

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < float("inf"):
                raise InvalidArgumentError(f"{name} is {value}; it is above 0")


@describe_options
@dataclass(frozen=True)
class ReplaySettings:
    """What to replay, and through what.

    Attributes:
        num_blocks: capacity in blocks, the null block not counted.
        rates: the engine that the trace clock imagines.
        block_bytes: of a block in the layers of one group; 0 for unknown, which is refused where copies take
            time: for a host pool, and for tiers with the trace clock.
    """

    trace: Annotated[
        str,
        Option(
            f"A trace file (.jsonl, .gz, .xz, .zst), or one of: {', '.join(BUNDLED_TRACES)}.",
            metavar="TRACE",
            is_argument=True,
        ),
    ]
    num_blocks: int
    block_size: Annotated[int | None, Option("Tokens per pool block. Default: the trace's own.", min=1)] = (
        None
    )
    convention: Annotated[
        str,
        Option(
            f"What counts as a block that can be hit: {', '.join(CONVENTIONS)}.",
            choices=CONVENTIONS,
        ),
    ] = CONVENTIONS[0]
    clock: Annotated[
        str,
        Option(
            f"{' or '.join(CLOCKS)}: requests one at a time, or arriving by timestamp and overlapping.",
            choices=CLOCKS,
        ),
    ] = "instant"
    rates: EngineRates = field(default_factory=EngineRates)
    limit: Annotated[int | None, Option("Only so many requests from the start.", min=1)] = None
    trace_block_size: Annotated[int | None, TRACE_BLOCK_SIZE] = None
    timestamp_unit: Annotated[str, Option("Unit of the trace's timestamps: ms or s.")] = "ms"
    skip_broken: Annotated[bool, Option("Pass over broken lines and count them, instead of stopping.")] = (
        False
    )
    seed: Annotated[str, Option("Seed of the block hashes, for traces of token ids.")] = "0"
    runs: Annotated[bool, Option("Prefer runs of consecutive block ids.")] = False
    groups: Annotated[
        str,
        Option(
            f"The model's KV cache groups: {FORMAT}. Each has an equal share of the layers, and blocks of "
            "its own from the same pool."
        ),
    ] = "full"
    chunk_tokens: Annotated[
        int | None,
        Option(
            "Prompts are computed in steps of so many tokens, and blocks that left a window are given up in "
            "between. Default: a prompt at once.",
            min=1,
        ),
    ] = None
    watermark: Annotated[
        float,
        Option(
            "Share of the pool that a request which begins leaves free while others run.",
            min=0.0,
            panel=ENGINE_PANEL,
        ),
    ] = 0.0
    host_blocks: Annotated[
        int,
        Option(
            "Capacity in blocks of a pool in host memory, for preempted requests of the trace clock; with "
            "--model or dimensions. It is other memory than that of --host-tier, which is for cached blocks.",
            min=0,
            panel=ENGINE_PANEL,
        ),
    ] = 0
    host_tier: Annotated[
        int,
        Option(
            "Capacity of a tier in host memory: cached blocks go there when the pool takes them anew, and "
            "are read back on a hit. It is other memory than that of --host-blocks, which is for preempted "
            "requests. With the trace clock it needs --model or dimensions.",
            metavar="BLOCKS",
            min=0,
            panel=TIERS_PANEL,
        ),
    ] = 0
    disk_tier: Annotated[
        int,
        Option(
            "Capacity of a tier on disk, below the host's: what that has no more room for goes there.",
            metavar="BLOCKS",
            min=0,
            panel=TIERS_PANEL,
        ),
    ] = 0
    tier_write: Annotated[
        str,
        Option(
            f"{' or '.join(TIER_WRITES)}: blocks go to the first tier when they are taken anew, or as soon "
            "as they are cached.",
            metavar="WHEN",
            choices=TIER_WRITES,
            panel=TIERS_PANEL,
        ),
    ] = TIER_WRITES[0]
    block_bytes: int = 0
    preemption: Annotated[
        str,
        Option(
            f"{', '.join(PREEMPTIONS)}: whether preempted requests go to the host's pool, as long as it has "
            "room, or are computed anew; cost takes what is faster.",
            name="preempt",
            metavar="RULE",
            choices=PREEMPTIONS,
            panel=ENGINE_PANEL,
        ),
    ] = PREEMPTIONS[0]
    keep_session_s: Annotated[
        float,
        Option(
            "Keep a conversation's blocks so long for its next turn; for traces with session ids.",
            name="keep_sessions",
            metavar="SECONDS",
            min=0.0,
        ),
    ] = 0.0
    keep_prefix_tokens: Annotated[
        int,
        Option(
            "Evict the first so many tokens of prompts, the system prompt, last of all.",
            name="keep_prefix",
            metavar="TOKENS",
            min=0,
        ),
    ] = 0

    def check(self) -> None:
        """Raise InvalidArgumentError where a value, or two together, cannot be meant."""
        if self.num_blocks < 1:
            raise InvalidArgumentError(
                f"the pool would have {self.num_blocks} blocks; it needs at least 1 besides the null block"
            )
        if self.block_size is not None and self.block_size < 1:
            raise InvalidArgumentError(f"block_size is {self.block_size}; it counts tokens, 1 or more")
        for name, _, option in list_options(ReplaySettings):
            value = getattr(self, name)
            if option.choices and value not in option.choices:
                raise InvalidArgumentError(f"unknown {name} {value!r}; known are {', '.join(option.choices)}")
        if self.host_blocks < 0 or self.block_bytes < 0:
            raise InvalidArgumentError(
                f"host_blocks is {self.host_blocks}, block_bytes {self.block_bytes}; they are 0 or more"
            )
        if self.host_blocks and self.clock != "trace":
            raise InvalidArgumentError(
                "a host pool is for preempted requests, and only with the trace clock there are some"
            )
        if self.host_blocks and not self.block_bytes:
            raise InvalidArgumentError("a host pool needs block_bytes: they say how long copies take")
        if self.host_tier < 0 or self.disk_tier < 0:
            raise InvalidArgumentError(
                f"host_tier is {self.host_tier}, disk_tier {self.disk_tier}; they are 0 or more blocks"
            )
        if (self.host_tier or self.disk_tier) and self.clock == "trace" and not self.block_bytes:
            raise InvalidArgumentError("colder tiers need block_bytes: they say how long copies take")
        if self.limit is not None and self.limit < 1:
            raise InvalidArgumentError(f"limit is {self.limit}; it counts requests, 1 or more")

    def open_trace(self) -> Trace:
        """Open the trace. Raises TraceError."""
        return Trace(
            self.trace,
            block_size=self.trace_block_size,
            timestamp_unit=self.timestamp_unit,
            skip_broken=self.skip_broken,
        )

    def read_requests(self, trace: Trace, block_size: int) -> Iterator[ReplayRequest]:
        """Yield the requests of the trace, up to the limit."""
        hasher = BlockHasher("xxh3_128", self.seed, block_size)
        for traced in islice(trace, self.limit):
            yield ReplayRequest(traced, block_size, self.convention, trace.block_size, hasher)

    def describe(self) -> dict[str, str | bool | int | float]:
        """Return all settings that are set, those of the engine included, for a report."""
        values = {**asdict(self), **asdict(self.rates)}
        return {name: value for name, value in values.items() if isinstance(value, (str, int, float))}


def find_block_size(block_size: int | None, trace: Trace) -> int:
    """Return the tokens per pool block: as asked for, or the trace's own."""
    return block_size or trace.block_size or DEFAULT_BLOCK_SIZE
