"""`PlanGoal`: what a plan is for. `CapacityPlan`: the result. `report_plan`: it in sentences and tables."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import msgspec

from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.curves.curve_report import choose_in_steps, describe_choice
from kv_pool.lab.report import Provenance
from kv_pool.lab.tables import (
    Column,
    Report,
    ReportTable,
    describe_broken,
    make_record,
    make_table,
    show_factor,
    show_share,
)

_ROWS = 9
_GIB = 2**30
_MIB = 2**20
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


def report_plan(plan: CapacityPlan) -> Report:
    """Return the sentences of a plan, its curve, the block sizes compared, and its checks."""
    sizes = [_tabulate_block_sizes(plan)] if plan.block_sizes else []
    sentences = [*describe_plan(plan), *describe_broken(plan.broken_lines, plan.first_broken)]
    shown = _choose_points(plan)
    left_out = describe_choice(sum(point in shown for point in plan.points), len(plan.points))
    records = [make_record(point, None) for point in plan.points]
    parts: list[ReportTable | str] = [
        *sentences,
        _tabulate_curve(plan, shown),
        *left_out,
        *sizes,
        _tabulate_checks(plan),
    ]
    return Report(plan, parts, records=records)


def describe_plan(plan: CapacityPlan) -> list[str]:
    """Return the recommendation and its reasons, one subject per line."""
    return [
        *_describe_goal(plan),
        _describe_more(plan),
        *_describe_demand(plan),
        *_describe_tiers(plan),
        *_describe_block_sizes(plan),
        _describe_speedup(plan),
        *_describe_checks(plan),
    ]


def format_bytes(num_bytes: float) -> str:
    """Return a size in GiB, or in MiB below 1 GiB."""
    return f"{num_bytes / _GIB:,.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:,.1f} MiB"


def _describe_goal(plan: CapacityPlan) -> Iterator[str]:
    size = _describe_pool(plan, plan.goal_blocks)
    found = plan.recommended
    most = f"; the most is {plan.ceiling:.2%}, from {_describe_pool(plan, plan.full_blocks)} on."
    if plan.goal == "memory":
        yield f"{size} has a hit rate of {found.token_hit_rate:.2%}{most}"
    else:
        if plan.goal == "target":
            yield f"{size} is the least capacity with a hit rate of {plan.target_hit_rate:.2%}."
        elif plan.goal == "price":
            where = "" if plan.demand is None else ", among those that hold running requests 99% of the time"
            yield f"{size} is where savings minus costs are largest{where}."
        elif plan.knee is None:
            yield f"The curve has no knee; {size} is the least capacity with all hits."
        else:
            yield f"The knee of the curve is at {size}."
        if found.num_blocks > plan.goal_blocks:
            yield (
                f"Running requests need more: recommended is {_describe_pool(plan, found.num_blocks)}, which "
                "holds them during 99% of the time."
            )
        yield f"Its hit rate is {found.token_hit_rate:.2%} of the prompt tokens{most}"
    if plan.cost_per_hour is not None and plan.saved_per_hour is not None:
        yield f"It costs {plan.cost_per_hour:,.4g} an hour, and its hits save {plan.saved_per_hour:,.4g}."


def _describe_more(plan: CapacityPlan) -> str:
    return (
        f"10% more memory adds {plan.points_of_more:.2f} points "
        f"({plan.recommended.points_per_gib:.4g} per GiB); 10% less loses {plan.points_of_less:.2f}."
    )


def _describe_demand(plan: CapacityPlan) -> Iterator[str]:
    demand = plan.demand
    if demand is None:
        yield "One request at a time: the demand of running requests is not part of this plan."
        return
    mean, p99, peak = (
        format_bytes(num_blocks * plan.block_bytes)
        for num_blocks in (demand.mean_blocks, demand.p99_blocks, demand.peak_blocks)
    )
    yield (
        f"Running requests hold {mean} on average, {p99} during 99% of the time, {peak} at the peak; "
        f"{demand.mean_running:,.1f} run on average, {demand.peak_running:,} at the peak."
    )
    if plan.recommended.num_blocks < demand.p99_blocks:
        yield "The recommended pool has less than that: requests wait, and the curve does not model it."


def _describe_tiers(plan: CapacityPlan) -> Iterator[str]:
    for tier in plan.tiers:
        yield (
            f"A {tier.name} tier of {format_bytes(tier.memory_bytes)} adds {tier.points:.2f} points "
            f"({tier.points_per_gib:.4g} per GiB)."
        )
    if not plan.tiers and plan.recommended.num_blocks >= plan.full_blocks:
        yield "Lower tiers add nothing: the pool has all hits."


def _describe_block_sizes(plan: CapacityPlan) -> Iterator[str]:
    tokens_per_id = plan.provenance.trace_block_size
    best = next((one for one in plan.block_sizes if one.block_size == plan.best_block_size), None)
    if best is not None:
        near = _find_larger(plan.block_sizes, best)
        others = ""
        if near is not None:
            others = (
                f"; blocks of {near.block_size} have {near.token_hit_rate:.2%} with "
                f"{near.num_blocks / best.num_blocks:.2g} times as many blocks to manage"
            )
        yield (
            f"In the same memory, blocks of {best.block_size} tokens hit most: "
            f"{best.token_hit_rate:.2%}{others}."
        )
    elif tokens_per_id is not None:
        yield (
            f"No other block size is compared: hash ids for {tokens_per_id} tokens allow multiples of "
            f"{tokens_per_id} only."
        )


def _find_larger(sizes: list[PlanBlockSize], best: PlanBlockSize) -> PlanBlockSize | None:
    """Return the largest block size within half a point of the best one; None if that is the best one."""
    near = max(
        (one for one in sizes if best.token_hit_rate - one.token_hit_rate <= 0.005 and not one.refuses),
        key=lambda one: one.block_size,
        default=best,
    )
    return near if near.block_size > best.block_size else None


def _describe_speedup(plan: CapacityPlan) -> str:
    check = plan.checks[0]
    if check.speedup_by_tokens is None:
        return "Nothing is left to compute: all prompt tokens are hits."
    by_flops = ""
    if check.speedup_by_flops is not None:
        by_flops = (
            f", and {check.speedup_by_flops:.2f} times in FLOPs, as hits are the cheap start of prompts"
        )
    return (
        f"Ideal prefill speed-up, replayed: {check.speedup_by_tokens:.2f} times in tokens{by_flops}. "
        "Ideal means computation only: no copies and no waiting."
    )


def _describe_checks(plan: CapacityPlan) -> Iterator[str]:
    differing = [check for check in plan.checks if not check.agrees]
    for check in differing:
        why = ""
        if check.waited_ms or check.refused:
            why = (
                f" Requests waited {check.waited_ms / 1000:,.1f} s on average, {check.preempted:,} were "
                f"preempted and {check.refused:,} refused, which the curve does not model."
            )
        yield (
            f"The prediction for the {check.name} differs from its replay by "
            f"{100 * abs(check.predicted - check.replayed):.2f} points, more than "
            f"{100 * check.tolerance:.2f}: use the replayed rate.{why}"
        )
    if plan.target_hit_rate is not None:
        replayed = plan.checks[0].replayed
        reaches = "reaches" if replayed >= plan.target_hit_rate else "does not reach"
        yield f"The replay has {replayed:.2%} and {reaches} {plan.target_hit_rate:.2%}."
    if not differing:
        most = max(abs(check.predicted - check.replayed) for check in plan.checks)
        yield f"All predictions agree with their replays: the largest difference is {100 * most:.2f} points."


def _describe_pool(plan: CapacityPlan, num_blocks: int) -> str:
    return f"{format_bytes((num_blocks + 1) * plan.block_bytes)} ({num_blocks:,} blocks)"


def _choose_points(plan: CapacityPlan) -> list[PlanPoint]:
    """Return points of the curve in equal steps, its knee, and the recommended one, which may be another."""
    points = {point.num_blocks: point for point in [plan.recommended, *plan.points]}
    capacities = [point.num_blocks for point in plan.points]
    chosen = choose_in_steps(capacities, _ROWS, plan.knee, plan.recommended.num_blocks)
    return [points[capacity] for capacity in chosen]


def _tabulate_curve(plan: CapacityPlan, shown: list[PlanPoint]) -> ReportTable:
    num_needed = 0 if plan.demand is None else plan.demand.p99_blocks

    def note(point: PlanPoint) -> str:
        notes = {
            "recommended": point.num_blocks == plan.recommended.num_blocks,
            "knee": point.num_blocks == plan.knee,
            "requests wait": point.num_blocks < num_needed,
        }
        return ", ".join(text for text, is_true in notes.items() if is_true)

    columns = (
        Column("memory", "memory_bytes", format_bytes),
        Column("blocks", "num_blocks"),
        Column("token hits", "token_hit_rate", show_share),
        Column("points per GiB", "points_per_gib", "{:.4f}".format),
        Column("prefill speed-up", "prefill_speedup", show_factor),
        Column("", note, str),
    )
    return make_table(
        columns,
        shown,
        title=f"predicted, blocks of {plan.block_size} tokens",
        caption="points per GiB: percentage points that each GiB of 10% more memory adds",
    )


def _tabulate_block_sizes(plan: CapacityPlan) -> ReportTable:
    def note(size: PlanBlockSize) -> str:
        if size.refuses:
            return "refuses requests"
        return "most hits" if size.block_size == plan.best_block_size else ""

    columns = (
        Column("tokens per block", "block_size"),
        Column("blocks", "num_blocks"),
        Column("token hits", "token_hit_rate", show_share),
        Column("", note, str),
    )
    title = f"predicted, {format_bytes(plan.recommended.memory_bytes)} in blocks of other sizes"
    return make_table(columns, plan.block_sizes, title=title)


def _tabulate_checks(plan: CapacityPlan) -> ReportTable:
    def measure(check: PlanCheck) -> float:
        return check.num_held_blocks * plan.block_bytes * check.block_size / plan.block_size

    columns = (
        Column("", "name", str),
        Column("memory", measure, format_bytes),
        Column("predicted", "predicted", show_share),
        Column("replayed", "replayed", show_share),
        Column("difference", lambda check: 100 * (check.replayed - check.predicted), "{:+.2f}".format),
        Column("speed-up, tokens", "speedup_by_tokens", show_factor),
        Column("FLOPs", "speedup_by_flops", show_factor),
        Column("", lambda check: None if check.agrees else "differs", str),
    )
    caption = "difference: in percentage points"
    return make_table(columns, plan.checks, title="predictions beside replays", caption=caption)
