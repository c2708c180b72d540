"""`PlanGoal`: what a plan is for. `CapacityPlan`: a recommended capacity with its reasons, beside replays."""

import re
from dataclasses import dataclass
from math import isfinite

import msgspec

from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.report import Provenance

_PARTS = ("gpu", "host", "disk", "prefill", "gpu-hour")
PRICE_FORMAT = "gpu=0.03,host=0.004,disk=0.0001,prefill=0.02"


@dataclass(frozen=True)
class Prices:
    """Prices in one currency.

    Attributes:
        gpu: of a GiB of GPU memory for an hour.
        prefill: of a million computed prompt tokens.
        host, disk: of a GiB of these for an hour; None if no such tier is wanted.
    """

    gpu: float
    prefill: float
    host: float | None = None
    disk: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not (value > 0 and isfinite(value)):
                raise InvalidArgumentError(f"the price {name} is {value}; it must be above 0")


@dataclass(frozen=True)
class PlanGoal:
    """The goal of a plan: one of a hit rate, a memory or prices. Without any, it is the knee of the curve.

    Attributes:
        target_hit_rate: the least capacity with this token hit rate, above 0 and below 1.
        memory_bytes: what this memory gives, and what more or less of it would change.
        prices: the capacity at which savings minus costs are largest.
    """

    target_hit_rate: float | None = None
    memory_bytes: int | None = None
    prices: Prices | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) > 1:
            raise InvalidArgumentError(f"a plan has one goal, not {' and '.join(given)}")
        if self.target_hit_rate is not None and not 0 < self.target_hit_rate < 1:
            raise InvalidArgumentError(
                f"target_hit_rate is {self.target_hit_rate}; it must be above 0 and below 1"
            )

    @property
    def name(self) -> str:
        """`target`, `memory`, `price` or `knee`."""
        if self.target_hit_rate is not None:
            return "target"
        if self.memory_bytes is not None:
            return "memory"
        return "knee" if self.prices is None else "price"


def parse_share(text: str) -> float:
    """Return the number of a share such as `0.35` or `35%`. Raises InvalidArgumentError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*", text)
    if found is None:
        raise InvalidArgumentError(f"{text!r} is not a share; write it as 0.35 or 35%")
    return float(found[1]) / (100 if found[2] else 1)


def parse_prices(text: str, prefill_tokens_per_s: float) -> Prices:
    """Return the prices of a text such as `gpu=0.03,host=0.004,prefill=0.02`.

    The price of computation is either `prefill`, of a million tokens, or `gpu-hour`, of an hour in which
    `prefill_tokens_per_s` are computed.

    Raises:
        InvalidArgumentError: a part is not known, is missing, occurs twice, or is not a number above 0.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in _PARTS or name in found:
            raise InvalidArgumentError(
                f"{part!r} is not a price; {', '.join(_PARTS)} are, each at most once: {PRICE_FORMAT}"
            )
        try:
            found[name] = float(value)
        except ValueError as error:
            raise InvalidArgumentError(
                f"{value!r} is not a number; write prices as {PRICE_FORMAT}"
            ) from error
    if "gpu" not in found or ("prefill" in found) == ("gpu-hour" in found):
        raise InvalidArgumentError(
            f"{text!r} needs gpu, and either prefill or gpu-hour: {PRICE_FORMAT}, where gpu, host and disk "
            "are per GiB and hour, and prefill per million tokens"
        )
    prefill = found.get("prefill")
    if prefill is None:
        prefill = found["gpu-hour"] / (prefill_tokens_per_s * 3600) * 1e6
    return Prices(found["gpu"], prefill, found.get("host"), found.get("disk"))


class PlanPoint(msgspec.Struct, frozen=True):
    """A capacity of the pool without lower tiers.

    Attributes:
        num_blocks: in blocks, without the null block.
        memory_bytes: the same with the null block.
        token_hit_rate: predicted.
        points_per_gib: percentage points that each GiB adds if the capacity grows by 10 %.
        prefill_speedup: prompt tokens divided by those that are not hits; None if all are hits.
    """

    num_blocks: int
    memory_bytes: int
    token_hit_rate: float
    points_per_gib: float
    prefill_speedup: float | None


class PlanTier(msgspec.Struct, frozen=True):
    """A lower tier below the recommended pool and the tiers above it.

    Attributes:
        name: "host" or "disk".
        num_blocks, memory_bytes: its capacity.
        token_hit_rate: predicted for the pool with this tier and those above it.
        points: percentage points that the tier adds to the pool and the tiers above it.
        points_per_gib: the same per GiB of the tier.
    """

    name: str
    num_blocks: int
    memory_bytes: int
    token_hit_rate: float
    points: float
    points_per_gib: float


class PlanDemand(msgspec.Struct, frozen=True):
    """The blocks of running requests, from a replay with the trace clock in a pool that evicts little.

    Attributes:
        num_blocks: capacity of that pool.
        mean_blocks, peak_blocks: blocks that running requests hold, mean over time and maximum.
        p99_blocks: the least number that is not exceeded during 99 % of the time.
        mean_running, peak_running: running requests.
    """

    num_blocks: int
    mean_blocks: float
    p99_blocks: int
    peak_blocks: int
    mean_running: float
    peak_running: int


class PlanBlockSize(msgspec.Struct, frozen=True):
    """The same memory in blocks of another size.

    Attributes:
        block_size: tokens per block.
        num_blocks: blocks in the recommended memory.
        token_hit_rate: predicted.
        refuses: True if the largest request does not fit.
    """

    block_size: int
    num_blocks: int
    token_hit_rate: float
    refuses: bool


class PlanCheck(msgspec.Struct, frozen=True):
    """A prediction beside its replay.

    Attributes:
        name: what was replayed.
        block_size, num_blocks, host_blocks, disk_blocks: the capacities.
        predicted, replayed: token hit rates.
        predicted_tokens, replayed_tokens: the same in tokens.
        tolerance: largest difference of the rates at which they agree; 0 for a prediction that is exact.
        agrees: whether they do.
        waited_ms: mean time that requests waited for blocks.
        preempted, refused: number of preemptions and of refused requests.
        speedup_by_tokens: prompt tokens divided by those that the replay computes; None if it computes none.
        speedup_by_flops: the same for FLOPs; None if the model's are not known.
    """

    name: str
    block_size: int
    num_blocks: int
    host_blocks: int
    disk_blocks: int
    predicted: float
    replayed: float
    predicted_tokens: int
    replayed_tokens: int
    tolerance: float
    agrees: bool
    waited_ms: float
    preempted: int
    refused: int
    speedup_by_tokens: float | None
    speedup_by_flops: float | None

    @property
    def num_held_blocks(self) -> int:
        """Blocks of the pool, with its null block, and of its tiers."""
        return self.num_blocks + 1 + self.host_blocks + self.disk_blocks


class CapacityPlan(msgspec.Struct, frozen=True):
    """A recommended capacity of the pool, and what changes it.

    Attributes:
        goal: "knee", "target", "memory" or "price".
        target_hit_rate, prices: the goal's, or None.
        block_size, block_bytes: tokens and bytes per block.
        clock: "instant": one request at a time, without output. "trace": requests overlap and generate.
        requests, tokens_in, largest_request: requests, prompt tokens, and blocks of the largest request.
        span_hours: time from the first to the last arrival.
        goal_blocks: the capacity for the goal, from the curve.
        recommended: the recommended capacity: the goal's, or `demand.p99_blocks` if that is larger and
            memory is not given.
        points_of_more, points_of_less: percentage points that 10 % more memory adds, and 10 % less loses.
        cost_per_hour, saved_per_hour: of the recommended memory, and of the computation that its hits save;
            None without prices.
        knee: blocks at the knee of the curve; None if it has none.
        ceiling: the token hit rate without evictions, and `full_blocks` the least capacity that has it.
        points: the curve.
        demand: blocks of running requests; None with the instant clock.
        tiers: host and disk below the recommended pool, in this order.
        block_sizes: the recommended memory in blocks of other sizes; empty if the trace allows one size only.
        best_block_size: the one with the most hits; of equal ones the largest.
        checks: predictions beside replays: the recommended pool first, then its tiers, the best block size
            if it is another, and the demand's pool.
        settings, provenance: as in `ReplayReport`.
    """

    goal: str
    target_hit_rate: float | None
    prices: Prices | None
    block_size: int
    block_bytes: int
    clock: str
    requests: int
    tokens_in: int
    largest_request: int
    span_hours: float
    goal_blocks: int
    recommended: PlanPoint
    points_of_more: float
    points_of_less: float
    cost_per_hour: float | None
    saved_per_hour: float | None
    knee: int | None
    ceiling: float
    full_blocks: int
    points: list[PlanPoint]
    demand: PlanDemand | None
    tiers: list[PlanTier]
    block_sizes: list[PlanBlockSize]
    best_block_size: int | None
    checks: list[PlanCheck]
    broken_lines: int
    first_broken: str | None
    settings: dict[str, str | bool | int | float]
    provenance: Provenance
