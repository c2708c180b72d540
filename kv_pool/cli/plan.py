"""`kv-pool plan`: recommend the memory of the pool and its tiers for a trace, checked by replays."""

from dataclasses import replace
from typing import Annotated

import typer
from rich.table import Table

from kv_pool.cli import options
from kv_pool.cli.console import Column, make_table, print_table, show_progress
from kv_pool.cli.foreign_text import escape_text, make_cell
from kv_pool.cli.options import choose_files, write_report
from kv_pool.cli.setting_options import takes
from kv_pool.replay.capacity import parse_memory
from kv_pool.replay.curves.curve_report import choose_in_steps
from kv_pool.replay.pictures.hit_rates import draw_plan
from kv_pool.replay.plan.make_plan import plan_capacity
from kv_pool.replay.plan.plan_report import (
    PRICE_FORMAT,
    CapacityPlan,
    PlanBlockSize,
    PlanCheck,
    PlanGoal,
    PlanPoint,
    parse_prices,
    parse_share,
)
from kv_pool.replay.plan.plan_words import describe_plan, format_bytes
from kv_pool.replay.settings import CLOCKS, TIERS_PANEL, ReplaySettings

_GOAL_PANEL = "Goal; the knee of the curve without one"
_ROWS = 9

_ORDER = """
trace model num_layers num_kv_heads head_size dtype_bytes target_hit_rate memory price host_memory disk_memory
block_size block_sizes clock convention prefill_rate decode_rate max_running speedup copy_rate disk_rate limit
trace_block_size timestamp_unit skip_broken seed json png
"""


@takes(ReplaySettings, _ORDER, num_blocks=1)
def plan(
    settings: ReplaySettings,
    model_options: options.ModelOptions,
    target_hit_rate: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="The least memory with this token hit rate: 0.35 or 35%.",
            rich_help_panel=_GOAL_PANEL,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What this memory gives, such as 80GiB, and what more or less would change.",
            rich_help_panel=_GOAL_PANEL,
        ),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            metavar="PRICES",
            help="The memory at which savings minus costs are largest: "
            f"{PRICE_FORMAT}, where gpu, host and disk are per GiB and hour, and prefill is per million "
            "computed tokens; or gpu-hour instead of prefill, with --prefill-rate.",
            rich_help_panel=_GOAL_PANEL,
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the host tier; 0 for none. Default: 4 times the pool, or by price.",
            rich_help_panel=TIERS_PANEL,
        ),
    ] = None,
    disk_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the disk tier; 0 for none. Default: 16 times the pool, or by price.",
            rich_help_panel=TIERS_PANEL,
        ),
    ] = None,
    block_sizes: Annotated[
        str,
        typer.Option(metavar="LIST", help="Block sizes to compare in the same memory, in tokens."),
    ] = "16,32,64,128,256,512",
    clock: Annotated[
        str,
        typer.Option(
            help="trace or instant: requests that overlap and generate, or one request at a time without "
            "output, for which the prediction of the pool is exact."
        ),
    ] = CLOCKS[1],
    json: options.JsonFile = None,
    png: Annotated[str | None, options.declare_picture("picture", "plan")] = None,
) -> None:
    """Recommend the memory of the pool and its tiers for a trace, and replay what is recommended."""
    kv = model_options.require_kv("a plan")
    goal = PlanGoal(
        None if target_hit_rate is None else parse_share(target_hit_rate),
        None if memory is None else parse_memory(memory),
        None if price is None else parse_prices(price, settings.rates.prefill_tokens_per_s),
    )
    sizes = options.parse_list("--block-sizes", block_sizes)
    picture = choose_files("plan.png", png, json)
    with show_progress("planning") as notify:
        found = plan_capacity(
            replace(settings, clock=clock),
            kv,
            goal,
            host_bytes=None if host_memory is None else parse_memory(host_memory),
            disk_bytes=None if disk_memory is None else parse_memory(disk_memory),
            block_sizes=sizes,
            on_progress=notify,
        )
    write_report(found, json)
    for line in describe_plan(found):
        print(line)
    if found.broken_lines:
        print(f"broken lines: {found.broken_lines:,}; {make_cell(found.first_broken or '').plain}")
    print_table(_make_curve(found))
    if found.block_sizes:
        print_table(_make_block_sizes(found))
    print_table(_make_checks(found))
    draw_plan(found, picture)
    print(f"plan: {escape_text(picture)}")


def _make_curve(found: CapacityPlan) -> Table:
    num_needed = 0 if found.demand is None else found.demand.p99_blocks

    def note(point: PlanPoint) -> str:
        notes = {
            "recommended": point.num_blocks == found.recommended.num_blocks,
            "knee": point.num_blocks == found.knee,
            "requests wait": point.num_blocks < num_needed,
        }
        return ", ".join(text for text, is_true in notes.items() if is_true)

    columns: list[Column] = [
        ("memory", lambda point: format_bytes(point.memory_bytes)),
        ("blocks", lambda point: f"{point.num_blocks:,}"),
        ("token hits", lambda point: f"{point.token_hit_rate:.2%}"),
        ("points per GiB", lambda point: f"{point.points_per_gib:.4f}"),
        ("prefill speed-up", lambda point: _format_factor(point.prefill_speedup)),
        ("", note),
    ]
    title = f"predicted, blocks of {found.block_size} tokens"
    caption = "points per GiB: percentage points that each GiB of 10% more memory adds"
    points = {point.num_blocks: point for point in [*found.points, found.recommended]}
    capacities = [point.num_blocks for point in found.points]
    chosen = choose_in_steps(capacities, _ROWS, found.knee, found.recommended.num_blocks)
    rows = [points[num_blocks] for num_blocks in chosen]
    return make_table(columns, rows, title=title, caption=caption)


def _make_block_sizes(found: CapacityPlan) -> Table:
    def note(size: PlanBlockSize) -> str:
        if size.refuses:
            return "refuses requests"
        return "most hits" if size.block_size == found.best_block_size else ""

    columns: list[Column] = [
        ("tokens per block", lambda size: f"{size.block_size:,}"),
        ("blocks", lambda size: f"{size.num_blocks:,}"),
        ("token hits", lambda size: f"{size.token_hit_rate:.2%}"),
        ("", note),
    ]
    title = f"predicted, {format_bytes(found.recommended.memory_bytes)} in blocks of other sizes"
    return make_table(columns, found.block_sizes, title=title)


def _make_checks(found: CapacityPlan) -> Table:
    def measure(check: PlanCheck) -> str:
        return format_bytes(check.num_held_blocks * found.block_bytes * check.block_size / found.block_size)

    columns: list[Column] = [
        ("", lambda check: check.name),
        ("memory", measure),
        ("predicted", lambda check: f"{check.predicted:.2%}"),
        ("replayed", lambda check: f"{check.replayed:.2%}"),
        ("difference", lambda check: f"{100 * (check.replayed - check.predicted):+.2f}"),
        ("speed-up, tokens", lambda check: _format_factor(check.speedup_by_tokens)),
        ("FLOPs", lambda check: _format_factor(check.speedup_by_flops)),
        ("", lambda check: "" if check.agrees else "differs"),
    ]
    caption = "difference: in percentage points"
    return make_table(columns, found.checks, title="predictions beside replays", caption=caption)


def _format_factor(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f}"
