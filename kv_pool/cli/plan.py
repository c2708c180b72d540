"""`kv-pool plan`: recommend the memory of the pool and its tiers for a trace, checked by replays."""

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from kv_pool.cli import options
from kv_pool.cli.console import show_progress
from kv_pool.cli.setting_options import takes
from kv_pool.lab.pictures.hit_rates import draw_plan
from kv_pool.lab.plan.make_plan import plan_capacity
from kv_pool.lab.plan.plan_report import PRICE_FORMAT, PlanGoal, parse_prices, parse_share
from kv_pool.lab.plan.plan_words import report_plan
from kv_pool.lab.settings import CLOCKS, TIERS_PANEL, ReplaySettings
from kv_pool.quantities import parse_memory

_GOAL_PANEL = "Goal; the knee of the curve without one"

_ORDER = """
trace model num_layers num_kv_heads head_size dtype_bytes target_hit_rate memory price host_memory disk_memory
block_size block_sizes clock convention prefill_rate decode_rate max_running speedup copy_rate disk_rate limit
trace_block_size timestamp_unit skip_broken seed json csv png
"""


@takes(ReplaySettings, _ORDER, num_blocks=1)
def plan(
    settings: ReplaySettings,
    model_options: options.ModelOptions,
    outputs: options.Outputs,
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
) -> None:
    """Recommend the memory of the pool and its tiers for a trace, and replay what is recommended."""
    kv = model_options.require_kv("a plan")
    goal = PlanGoal(
        None if target_hit_rate is None else parse_share(target_hit_rate),
        None if memory is None else parse_memory(memory),
        None if price is None else parse_prices(price, settings.rates.prefill_tokens_per_s),
    )
    sizes = options.parse_list("--block-sizes", block_sizes)
    outputs.check()
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
    outputs.write(report_plan(found), partial(draw_plan, found))
