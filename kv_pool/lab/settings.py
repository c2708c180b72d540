"""`ReplaySettings`: the settings of a replay, each declared with its option; `ReplayTrace`: their trace."""

from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Annotated

from kv_pool.core.block_hash import BlockHasher
from kv_pool.core.policy_names import find_policy, list_policies
from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.groups import FORMAT, STATES
from kv_pool.lab.replay_request import CONVENTIONS, ReplayRequest
from kv_pool.lab.request_outcomes import BREAKDOWNS, parse_breakdowns
from kv_pool.lab.trace import Trace, TraceRequest
from kv_pool.option import Option, check_options, describe_options, setting
from kv_pool.quantities import parse_memory
from kv_pool.shared_options import BUNDLED_TRACES, TIME_UNIT, TRACE_BLOCK_SIZE

CLOCKS = ("instant", "trace")
PREEMPTIONS = ("cost", "swap", "recompute")
"""The rules for preempted requests: swap or recompute, whichever is faster; always swap; never swap."""

OPTIMUM = "optimum"
"""The cache policy that knows the trace; of replays only."""

TIER_WRITES = ("back", "through")

DEFAULT_BLOCK_SIZE = 16
"""Tokens per block for traces of token ids, which have no block size."""

ENGINE_PANEL = "Simulated engine of the trace clock"
TIERS_PANEL = "Lower tiers, for cached blocks that the pool reuses"


def list_known_policies() -> list[str]:
    """Return the names of the policies that a replay knows without a file or a module."""
    return ["lru", *list_policies(), OPTIMUM]


def _show_bytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.0f}GB"


@describe_options
@dataclass(frozen=True)
class EngineRates:
    """The engine that the trace clock simulates. A copy rate is for both directions together.

    Attributes:
    """

    prefill_tokens_per_s: float = setting(
        "Prompt tokens computed per second, one prompt at a time.",
        default=50_000.0,
        name="prefill_rate",
        panel=ENGINE_PANEL,
    )
    decode_tokens_per_s: float = setting(
        "Tokens generated per second and request.", default=30.0, name="decode_rate", panel=ENGINE_PANEL
    )
    max_running: int = setting("Maximum number of running requests.", default=256, min=1, panel=ENGINE_PANEL)
    speedup: float = setting(
        "Factor by which requests arrive faster than in the trace.", default=1.0, panel=ENGINE_PANEL
    )
    copy_bytes_per_s: float = setting(
        "Bytes copied between device and host per second, such as 25GB.",
        default=25e9,
        name="copy_rate",
        parse=parse_memory,
        show=_show_bytes,
        panel=ENGINE_PANEL,
    )
    disk_bytes_per_s: float = setting(
        "Bytes copied between host and disk per second.",
        default=5e9,
        name="disk_rate",
        parse=parse_memory,
        show=_show_bytes,
        panel=TIERS_PANEL,
    )

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < float("inf"):
                raise InvalidArgumentError(f"{name} is {value}; it must be above 0")


@describe_options
@dataclass(frozen=True)
class ReplaySettings:
    """The settings of a replay.

    Attributes:
        num_blocks: capacity in blocks, without the null block.
        rates: the engine that the trace clock simulates.
        block_bytes: size of a block in the layers of one group; 0 if unknown. Required if copies take time:
            for a host pool, and for tiers with the trace clock.
    """

    trace: Annotated[
        str,
        Option(
            f"A trace file (.jsonl, .gz, .xz, .zst), or one of: {', '.join(BUNDLED_TRACES)}.",
            metavar="TRACE",
            known=lambda: BUNDLED_TRACES,
            is_argument=True,
        ),
    ]
    num_blocks: int
    block_size: int | None = setting("Tokens per pool block. Default: the trace's.", default=None, min=1)
    convention: str = setting(
        f"Which blocks can be hit: {', '.join(CONVENTIONS)}.", default=CONVENTIONS[0], choices=CONVENTIONS
    )
    clock: str = setting(
        f"{' or '.join(CLOCKS)}: one request at a time, or requests that arrive by timestamp and overlap.",
        default="instant",
        choices=CLOCKS,
    )
    rates: EngineRates = field(default_factory=EngineRates)
    limit: int | None = setting("Maximum number of requests, from the start.", default=None, min=1)
    trace_block_size: int | None = setting(TRACE_BLOCK_SIZE, default=None)
    timestamp_unit: str = setting(TIME_UNIT, default="ms")
    skip_broken: bool = setting("Skip broken lines and count them, instead of stopping.", default=False)
    seed: str = setting("Seed of the block hashes, for traces of token ids.", default="0")
    runs: bool = setting("Prefer runs of consecutive block ids.", default=False)
    policy: str = setting(
        "The cache policy: lru, a name of kv_pool/policies such as s3fifo, an entry point, module:Class "
        "or file.py:Class. flat:NAME makes each block an object of its own. optimum knows the trace, and "
        "needs the instant clock, full attention, and no lower tiers and kept sessions or prefixes.",
        default="lru",
        metavar="NAME",
        flags=("--policy", "--policies"),
        known=list_known_policies,
    )
    groups: str = setting(
        f"The model's KV cache groups: {FORMAT}. Each group has an equal share of the layers, and its "
        "own blocks from the same pool.",
        default="full",
    )
    states: str = setting(
        "Where states of mamba groups, and windows, stay cached. steps: at the end of each step. blocks: "
        "at the end of each block. checkpoints: at the end of a prompt and where shared prefixes end, as "
        "in vLLM 0.33. bounded: as checkpoints, also in the middle of a new prompt, and for the last two "
        "turns of a conversation only.",
        default=STATES[0],
        metavar="RULE",
        choices=STATES,
    )
    chunk_tokens: int | None = setting(
        "Maximum number of prompt tokens per step. Blocks outside a window are released between steps. "
        "Default: the whole prompt in one step.",
        default=None,
        min=1,
    )
    watermark: float = setting(
        "Share of the pool that must stay free when a request starts while others run.",
        default=0.0,
        min=0.0,
        panel=ENGINE_PANEL,
    )
    host_blocks: int = setting(
        "Capacity in blocks of a host memory pool for preempted requests; needs the trace clock and "
        "--model or dimensions. Separate from the memory of --host-tier, which is for cached blocks.",
        default=0,
        min=0,
        panel=ENGINE_PANEL,
    )
    host_tier: int = setting(
        "Capacity of a tier in host memory. Cached blocks are offloaded to it when the pool reuses them, "
        "and loaded on a hit. Separate from the memory of --host-blocks, which is for preempted "
        "requests. With the trace clock it needs --model or dimensions.",
        default=0,
        metavar="BLOCKS",
        min=0,
        panel=TIERS_PANEL,
    )
    disk_tier: int = setting(
        "Capacity of a tier on disk, below the host tier. It receives the blocks that the host tier evicts.",
        default=0,
        metavar="BLOCKS",
        min=0,
        panel=TIERS_PANEL,
    )
    tier_write: str = setting(
        f"{' or '.join(TIER_WRITES)}: offload blocks to the first tier when the pool reuses them, or as "
        "soon as they are cached.",
        default=TIER_WRITES[0],
        metavar="WHEN",
        choices=TIER_WRITES,
        panel=TIERS_PANEL,
    )
    block_bytes: int = 0
    preemption: str = setting(
        f"{', '.join(PREEMPTIONS)}: swap preempted requests to the host pool while it has free blocks, "
        "or recompute them; cost chooses the faster way.",
        default=PREEMPTIONS[0],
        name="preempt",
        metavar="RULE",
        choices=PREEMPTIONS,
        panel=ENGINE_PANEL,
    )
    keep_session_s: float = setting(
        "Seconds for which to retain a conversation's blocks for its next turn; needs session ids.",
        default=0.0,
        name="keep_sessions",
        metavar="SECONDS",
        min=0.0,
    )
    keep_prefix_tokens: int = setting(
        "Number of tokens at the start of each prompt, such as a system prompt, to evict last.",
        default=0,
        name="keep_prefix",
        metavar="TOKENS",
        min=0,
    )

    by: str | None = setting(
        f"Also show the hit rate by each of these, separated by commas: {', '.join(BREAKDOWNS)}.",
        default=None,
        metavar="LIST",
        known=lambda: BREAKDOWNS,
    )

    @property
    def has_tiers(self) -> bool:
        """True if there is a lower tier, in host memory or on disk."""
        return bool(self.host_tier or self.disk_tier)

    def check(self) -> None:
        """Raise InvalidArgumentError if a value or a combination of values is invalid."""
        parse_breakdowns(self.by or "")
        if self.num_blocks < 1:
            raise InvalidArgumentError(
                f"num_blocks is {self.num_blocks}; the pool needs at least 1 block besides the null block"
            )
        check_options(self)
        if self.block_bytes < 0:
            raise InvalidArgumentError(f"block_bytes is {self.block_bytes}; it must be 0 or more")
        if self.host_blocks and self.clock != "trace":
            raise InvalidArgumentError(
                "a host pool is for preempted requests, which only the trace clock has; set clock to 'trace'"
            )
        if not self.block_bytes and (self.host_blocks or (self.clock == "trace" and self.has_tiers)):
            raise InvalidArgumentError(
                "a host pool, and with the trace clock lower tiers, need the bytes of a block (--model or "
                "dimensions; block_bytes), to compute the duration of copies"
            )
        if "," in self.policy:
            raise InvalidArgumentError(
                f"a replay has one cache policy, not {self.policy!r}; kv-pool compare takes several"
            )
        if self.policy != OPTIMUM:
            find_policy(self.policy, (OPTIMUM,))
        elif (obstacle := self.find_optimum_obstacle()) is not None:
            raise InvalidArgumentError(
                f"no {OPTIMUM}: {obstacle}; leave the defaults, or choose another policy"
            )

    def find_optimum_obstacle(self) -> str | None:
        """Return why the optimum of these replays is not known, or None."""
        if self.clock != "instant":
            return "with the trace clock, running requests hold blocks; the optimum is for one at a time"
        if self.groups != "full":
            return "the optimum is known for full attention only"
        if self.has_tiers:
            return "the optimum is known without lower tiers only"
        if self.keep_session_s or self.keep_prefix_tokens:
            return "the optimum is known without kept sessions and prefixes only"
        return None

    def check_used(self, used: Container[str], reader: str, why: str) -> None:
        """Raise InvalidArgumentError if a setting of the replay or the engine is changed, and not in `used`.

        Args:
            reader, why: for the message: what ignores the other settings, and the reason.
        """
        usual = ReplaySettings(self.trace, self.num_blocks).describe()
        changed = [name for name, value in self.describe().items() if value != usual.get(name)]
        ignored = ", ".join(name for name in changed if name not in used)
        if ignored:
            raise InvalidArgumentError(f"{reader} ignores {ignored}: {why}")

    def open_trace(self) -> "ReplayTrace":
        """Open the trace. Raises TraceError."""
        return ReplayTrace(self)

    def describe(self) -> dict[str, str | bool | int | float]:
        """Return all settings that are not None, including the engine's, for a report."""
        values = {**asdict(self), **asdict(self.rates)}
        return {name: value for name, value in values.items() if isinstance(value, (str, int, float))}


class ReplayTrace(Trace):
    """The trace of these settings, which say how it is read.

    Attributes:
        settings: the settings.
        pool_block_size: tokens per pool block: those of the settings, or else the trace's block size.
        hasher: hashes the pool blocks of token ids.
    """

    def __init__(self, settings: ReplaySettings) -> None:
        super().__init__(
            settings.trace,
            block_size=settings.trace_block_size,
            timestamp_unit=settings.timestamp_unit,
            skip_broken=settings.skip_broken,
        )
        self.settings = settings
        self.pool_block_size = settings.block_size or self.block_size or DEFAULT_BLOCK_SIZE
        self.hasher = BlockHasher("xxh3_128", settings.seed, self.pool_block_size)

    def read_traced(self) -> Iterator[TraceRequest]:
        """Yield the requests of the file, up to the limit."""
        return islice(self, self.settings.limit)

    def read_requests(self) -> Iterator[ReplayRequest]:
        """Yield the requests of a replay, up to the limit."""
        size, convention = self.pool_block_size, self.settings.convention
        for traced in self.read_traced():
            yield ReplayRequest.from_trace(traced, size, convention, self.block_size, self.hasher)

    def find_share(self, num_requests: int) -> float:
        """Return the share of the requests up to the limit that is read, after this number of them."""
        limit = self.settings.limit
        return max(self.position, num_requests / limit if limit else 0.0)
