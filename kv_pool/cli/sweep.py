"""`kv-pool sweep`: measure the hit rate over the size of the cache."""

import os
from functools import partial
from typing import Annotated

import typer

from kv_pool.cli import options
from kv_pool.cli.console import show_progress
from kv_pool.cli.outputs import Outputs
from kv_pool.cli.setting_options import takes
from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.pictures.hit_rates import draw_hit_rates
from kv_pool.replay.replay_words import report_sweep
from kv_pool.replay.report import read_reports
from kv_pool.replay.settings import TIERS_PANEL, ReplaySettings
from kv_pool.replay.sweep import run_sweep

_ORDER = """
trace blocks memory model num_layers num_kv_heads head_size dtype_bytes block_size policy convention clock
prefill_rate decode_rate max_running speedup groups states chunk_tokens watermark host_tier disk_tier
copy_rate disk_rate tier_write limit trace_block_size timestamp_unit skip_broken seed json png overlay jobs
"""


@takes(ReplaySettings, _ORDER, num_blocks=0)
def sweep(
    settings: ReplaySettings,
    capacity: options.CapacityOptions,
    outputs: Outputs,
    host_tier: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Capacities in blocks of a tier in host memory, combined with each capacity of the pool: "
            "0,10k,30k. With the trace clock it needs --model or dimensions.",
            rich_help_panel=TIERS_PANEL,
        ),
    ] = "0",
    disk_tier: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Capacities of a tier on disk below it, combined with each of the others.",
            rich_help_panel=TIERS_PANEL,
        ),
    ] = "0",
    overlay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="With --png: draw an earlier sweep, too, from its --json file. May be repeated.",
        ),
    ] = None,
    jobs: options.Jobs = 0,
) -> None:
    """Replay a trace at several capacities in parallel."""
    settings, capacities = capacity.find(settings)
    host_tiers = options.parse_list("--host-tier", host_tier)
    disk_tiers = options.parse_list("--disk-tier", disk_tier)
    if overlay and outputs.png is None:
        raise InvalidArgumentError("--overlay is drawn into the picture of --png; pass --png, too")
    others = {file: read_reports(file) for file in overlay or ()}
    outputs.check()
    num_processes = jobs or os.cpu_count() or 1
    with show_progress("sweeping") as notify:
        reports = run_sweep(settings, capacities, num_processes, notify, host_tiers, disk_tiers)
    outputs.write(report_sweep(reports), partial(draw_hit_rates, reports, overlays=others))
