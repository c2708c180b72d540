"""`kv-pool sweep`: measure the hit rate over the size of the cache."""

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kv_pool.cli import options
from kv_pool.cli.console import Column, make_table, measure_table, print_table, show_progress
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
    show_reports(reports, Console())
    draw_hit_rates(reports, picture, others)
    print(f"curve: {escape_text(picture)}")


def show_reports(reports: list[ReplayReport], console: Console) -> None:
    """Print a table with one row per replay, and a bar for the token hit rate if there is space."""
    table = _lay_out(reports, 0)
    room = console.width - measure_table(table, console).minimum - _AROUND_BAR
    longest = round(_BAR_WIDTH * max(report.token_hit_rate for report in reports))
    bar_width = _BAR_WIDTH if longest <= room or not console.is_terminal else room
    print_table(table if bar_width < _MIN_BAR_WIDTH else _lay_out(reports, bar_width), console)


def _lay_out(reports: list[ReplayReport], bar_width: int) -> Table:
    bound = reports[0].infinite_cache
    caption = None
    if bound is not None:
        caption = f"an infinite cache: {bound.token_hit_rate:.2%} token hits, {bound.num_blocks:,} blocks"
    columns = _list_columns(reports)
    if bar_width:
        columns.append(("", lambda report: "█" * round(bar_width * report.token_hit_rate)))
    title = f"hit rate over capacity in blocks of {reports[0].block_size} tokens"
    return make_table(columns, reports, title=title, caption=caption)


def _list_columns(reports: list[ReplayReport]) -> list[Column]:
    has_host, has_disk = (
        any(report.settings[name] for report in reports) for name in ("host_tier", "disk_tier")
    )
    columns: list[Column] = [("blocks", lambda report: f"{report.num_blocks:,}")]
    if has_host:
        columns.append(("host tier", lambda report: f"{report.settings['host_tier']:,}"))
    if has_disk:
        columns.append(("disk tier", lambda report: f"{report.settings['disk_tier']:,}"))
    columns.append(("token hits", lambda report: f"{report.token_hit_rate:.2%}"))
    refused: Column = ("refused", lambda report: f"{report.refused_requests:,}")
    if has_host or has_disk:
        columns += [("from tiers" if has_disk else "from host", _share_of_tiers), refused]
    else:
        columns += [
            ("block hits", lambda report: f"{report.block_hit_rate:.2%}"),
            refused,
            ("preempted", lambda report: f"{report.preempted:,}"),
        ]
    return [*columns, ("evictions", lambda report: f"{report.evictions:,}")]


def _share_of_tiers(report: ReplayReport) -> str:
    return f"{sum(tier.tokens_hit for tier in report.tiers) / report.tokens_in:.2%}"
