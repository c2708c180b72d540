"""`kv-pool sweep`: measure the hit rate over the size of the cache."""

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kv_pool.cli import options
from kv_pool.cli.console import measure_table, new_table, print_table, show_progress
from kv_pool.cli.foreign_text import escape_text
from kv_pool.cli.options import choose_files, write_report
from kv_pool.cli.setting_options import takes
from kv_pool.replay.pictures.hit_rates import draw_hit_rates
from kv_pool.replay.report import ReplayReport, read_reports
from kv_pool.replay.settings import TIERS_PANEL, ReplaySettings
from kv_pool.replay.sweep import run_sweep

_BAR_WIDTH = 16
_MIN_BAR_WIDTH = 4
_AROUND_BAR = 3


_ORDER = """
trace blocks memory model num_layers num_kv_heads head_size dtype_bytes block_size policy convention clock
prefill_rate decode_rate max_running speedup groups states chunk_tokens watermark host_tier disk_tier
copy_rate disk_rate tier_write limit trace_block_size timestamp_unit skip_broken seed json png overlay jobs
"""


@takes(ReplaySettings, _ORDER, num_blocks=0)
def sweep(
    settings: ReplaySettings,
    capacity: options.CapacityOptions,
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
    json: options.JsonFile = None,
    png: Annotated[str | None, options.declare_picture("curve", "sweep")] = None,
    overlay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Draw an earlier sweep into the same picture, from its --json file. May be repeated.",
        ),
    ] = None,
    jobs: options.Jobs = 0,
) -> None:
    """Replay a trace at several capacities in parallel, and draw the hit-rate curve."""
    settings, capacities = capacity.find(settings)
    host_tiers = options.parse_list("--host-tier", host_tier)
    disk_tiers = options.parse_list("--disk-tier", disk_tier)
    others = {file: read_reports(file) for file in overlay or ()}
    picture = choose_files("sweep.png", png, json)
    num_processes = jobs or os.cpu_count() or 1
    with show_progress("sweeping") as notify:
        reports = run_sweep(settings, capacities, num_processes, notify, host_tiers, disk_tiers)
    write_report(reports, json)
    console = Console()
    print_table(make_table(reports, console), console)
    draw_hit_rates(reports, picture, others)
    print(f"curve: {escape_text(picture)}")


def make_table(reports: list[ReplayReport], console: Console) -> Table:
    """Return a table with one row per replay, and a bar for the token hit rate if there is space."""
    table = _lay_out(reports, 0)
    room = console.width - measure_table(table, console).minimum - _AROUND_BAR
    longest = round(_BAR_WIDTH * max(report.token_hit_rate for report in reports))
    bar_width = _BAR_WIDTH if longest <= room or not console.is_terminal else room
    return table if bar_width < _MIN_BAR_WIDTH else _lay_out(reports, bar_width)


def _lay_out(reports: list[ReplayReport], bar_width: int) -> Table:
    tiers = [name for name in ("host_tier", "disk_tier") if any(report.settings[name] for report in reports)]
    rows = [_make_row(report, tiers) for report in reports]
    bound = reports[0].infinite_cache
    caption = ""
    if bound is not None:
        caption = f"an infinite cache: {bound.token_hit_rate:.2%} token hits, {bound.num_blocks:,} blocks"
    for report, row in zip(reports, rows, strict=True):
        if bar_width:
            row[""] = "█" * round(bar_width * report.token_hit_rate)
    return new_table(
        rows[0],
        [list(row.values()) for row in rows],
        right=[title for title in rows[0] if title],
        title=f"hit rate over capacity in blocks of {reports[0].block_size} tokens",
        caption=caption or None,
    )


def _make_row(report: ReplayReport, tiers: list[str]) -> dict[str, str]:
    token_hits = {"token hits": f"{report.token_hit_rate:.2%}"}
    sizes = {"blocks": f"{report.num_blocks:,}"}
    if tiers:
        sizes |= {name.replace("_", " "): f"{report.settings[name]:,}" for name in tiers}
        share = sum(tier.tokens_hit for tier in report.tiers) / report.tokens_in
        source = "from host" if tiers == ["host_tier"] else "from tiers"
        others = {source: f"{share:.2%}", "refused": f"{report.refused_requests:,}"}
    else:
        others = {
            "block hits": f"{report.block_hit_rate:.2%}",
            "refused": f"{report.refused_requests:,}",
            "preempted": f"{report.preempted:,}",
        }
    return sizes | token_hits | others | {"evictions": f"{report.evictions:,}"}
