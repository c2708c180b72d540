"""`kv-pool plan`: recommend the memory of the pool and its tiers for a trace, checked by replays."""

from dataclasses import replace
from functools import partial

from kv_pool.cli import options
from kv_pool.cli.console import show_progress
from kv_pool.cli.setting_options import takes
from kv_pool.lab.pictures.hit_rates import draw_plan
from kv_pool.lab.plan.make_plan import plan_capacity
from kv_pool.lab.plan.plan_report import PRICE_FORMAT, PlanGoal, parse_prices, parse_share
from kv_pool.lab.plan.plan_words import report_plan
from kv_pool.lab.settings import CLOCKS, TIERS_PANEL, ReplaySettings
from kv_pool.option import setting
from kv_pool.quantities import parse_memory

_GOAL_PANEL = "Goal; the knee of the curve without one"

_ORDER = """
trace model num_layers num_kv_heads head_size dtype_bytes target_hit_rate memory price host_memory disk_memory
block_size block_sizes clock convention prefill_rate decode_rate max_running speedup copy_rate disk_rate limit
trace_block_size timestamp_unit skip_broken seed json csv png
"""


@takes(_ORDER, num_blocks=1)
def plan(
    settings: ReplaySettings,
    model_options: options.ModelOptions,
    outputs: options.Outputs,
    target_hit_rate: float | None = setting(
        "The least memory with this token hit rate: 0.35 or 35%.",
        default=None,
        metavar="SHARE",
        parse=parse_share,
        panel=_GOAL_PANEL,
    ),
    memory: int | None = setting(
        "What this memory gives, such as 80GiB, and what more or less would change.",
        default=None,
        metavar="SIZE",
        parse=parse_memory,
        panel=_GOAL_PANEL,
    ),
    price: str | None = setting(
        f"The memory at which savings minus costs are largest: {PRICE_FORMAT}, where gpu, host and disk are "
        "per GiB and hour, and prefill is per million computed tokens; or gpu-hour instead of prefill, with "
        "--prefill-rate.",
        default=None,
        metavar="PRICES",
        panel=_GOAL_PANEL,
    ),
    host_memory: int | None = setting(
        "Memory of the host tier; 0 for none. Default: 4 times the pool, or by price.",
        default=None,
        metavar="SIZE",
        parse=parse_memory,
        panel=TIERS_PANEL,
    ),
    disk_memory: int | None = setting(
        "Memory of the disk tier; 0 for none. Default: 16 times the pool, or by price.",
        default=None,
        metavar="SIZE",
        parse=parse_memory,
        panel=TIERS_PANEL,
    ),
    block_sizes: str = setting(
        "Block sizes to compare in the same memory, in tokens.",
        default="16,32,64,128,256,512",
        metavar="LIST",
    ),
    clock: str = setting(
        "trace or instant: requests that overlap and generate, or one request at a time without output, for "
        "which the prediction of the pool is exact.",
        default=CLOCKS[1],
    ),
) -> None:
    """Recommend the memory of the pool and its tiers for a trace, and replay what is recommended."""
    kv = model_options.require_kv("a plan")
    goal = PlanGoal(
        target_hit_rate,
        memory,
        None if price is None else parse_prices(price, settings.rates.prefill_tokens_per_s),
    )
    sizes = options.parse_list("--block-sizes", block_sizes)
    outputs.check()
    with show_progress("planning") as notify:
        found = plan_capacity(
            replace(settings, clock=clock),
            kv,
            goal,
            host_bytes=host_memory,
            disk_bytes=disk_memory,
            block_sizes=sizes,
            on_progress=notify,
        )
    outputs.write(report_plan(found), partial(draw_plan, found))
