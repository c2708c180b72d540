"""`kv-pool curve`: the hit rate of LRU and of the optimum over the size of the cache, from one reading."""

from dataclasses import replace
from functools import partial

from kv_pool.cli import options
from kv_pool.cli.console import show_progress
from kv_pool.cli.setting_options import takes
from kv_pool.lab.curves.curve_report import report_curves
from kv_pool.lab.curves.measure import measure_curves
from kv_pool.lab.pictures.hit_rates import draw_curves
from kv_pool.lab.settings import ReplaySettings
from kv_pool.option import setting

_ORDER = """
trace blocks memory model num_layers num_kv_heads head_size dtype_bytes block_size convention limit
trace_block_size timestamp_unit skip_broken seed sample json csv png
"""


@takes(_ORDER, num_blocks=1)
def curve(
    settings: ReplaySettings,
    capacity: options.CapacityOptions,
    outputs: options.Outputs,
    sample: float | None = setting(
        "Estimate the hit rates, with standard errors, from this share of the sessions, or of the prompts by "
        "their first block after a common system prompt: 0.1.",
        default=None,
        metavar="RATE",
    ),
) -> None:
    """Compute the hit rate of LRU and of optimal replacement at many capacities in seconds.

    Default capacities: 64 in equal ratios, from the largest request to the least with all hits of LRU.
    """
    capacities = None
    if capacity.blocks is None and capacity.memory is None:
        settings, _ = replace(capacity, blocks="1").find(settings)
    else:
        settings, capacities = capacity.find(settings)
    outputs.check()
    with show_progress("computing curves") as notify:
        found = measure_curves(settings, capacities, notify, sample)
    outputs.write(report_curves(found), partial(draw_curves, found))
