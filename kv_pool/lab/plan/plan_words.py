"""`report_plan`: a plan in sentences and tables."""

from collections.abc import Iterator

from kv_pool.lab.curves.curve_report import choose_in_steps, describe_choice
from kv_pool.lab.plan.plan_report import CapacityPlan, PlanBlockSize, PlanCheck, PlanPoint
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
