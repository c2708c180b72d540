"""`kv-pool sweep`: the hit rate over the size of the cache."""

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.table import Table

from kv_pool.cli import options
from kv_pool.cli.console import measure_table, print_table
from kv_pool.cli.foreign_text import escape_text
from kv_pool.cli.outputs import find_unused, write_report
from kv_pool.cli.progress import make_progress_bar
from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.output_file import check_can_write
from kv_pool.replay.plot import check_can_draw, draw_hit_rates
from kv_pool.replay.replay_request import CONVENTIONS
from kv_pool.replay.report import ReplayReport
from kv_pool.replay.simulator import TIER_WRITES, ReplaySettings
from kv_pool.replay.sweep import run_sweep
from kv_pool.replay.trace_clock import EngineRates

_BAR_WIDTH = 16
_MIN_BAR_WIDTH = 4
_AROUND_BAR = 3


def sweep(
    trace: options.TraceArgument,
    blocks: Annotated[str, typer.Option(help="Capacities in pool blocks: 1000,3000,10000")],
    block_size: options.BlockSize = None,
    convention: options.Convention = CONVENTIONS[0],
    clock: options.Clock = "instant",
    prefill_rate: options.PrefillRate = EngineRates.prefill_tokens_per_s,
    decode_rate: options.DecodeRate = EngineRates.decode_tokens_per_s,
    max_running: options.MaxRunning = EngineRates.max_running,
    speedup: options.Speedup = EngineRates.speedup,
    groups: options.Groups = "full",
    chunk_tokens: options.ChunkTokens = None,
    watermark: options.Watermark = 0.0,
    host_tier: Annotated[
        str,
        typer.Option(
            metavar="BLOCKS",
            help="Capacities of a tier in host memory, too, each with each of the pool's: 0,10000,30000. "
            "For the instant clock.",
        ),
    ] = "0",
    tier_write: options.TierWrite = TIER_WRITES[0],
    limit: options.Limit = None,
    trace_block_size: options.TraceBlockSize = None,
    timestamp_unit: options.TimestampUnit = "ms",
    skip_broken: options.SkipBroken = False,
    seed: options.Seed = "0",
    json: options.JsonFile = None,
    png: Annotated[
        str | None,
        typer.Option(help="Where to draw the curve. Default: sweep.png; sweep-2.png and so on if it exists."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes; 0 for one per core.", min=0)] = 0,
) -> None:
    """Replay a trace at several capacities in parallel, and draw the hit-rate curve."""
    capacities = _parse_numbers("--blocks", blocks)
    host_tiers = _parse_numbers("--host-tier", host_tier)
    if host_tiers != [0] and clock != "instant":
        raise InvalidArgumentError("--host-tier is for the instant clock here; for another: kv-pool replay")
    picture = find_unused("sweep.png") if png is None else png
    check_can_draw(picture)
    if json is not None:
        check_can_write(json)
    settings = ReplaySettings(
        trace=trace,
        num_blocks=capacities[0],
        block_size=block_size,
        convention=convention,
        clock=clock,
        rates=EngineRates(prefill_rate, decode_rate, max_running, speedup),
        limit=limit,
        trace_block_size=trace_block_size,
        timestamp_unit=timestamp_unit,
        skip_broken=skip_broken,
        seed=seed,
        groups=groups,
        chunk_tokens=chunk_tokens,
        watermark=watermark,
        tier_write=tier_write,
    )
    num_replays = len(capacities) * len(host_tiers)
    with make_progress_bar("sweeping", MofNCompleteColumn()) as bar:
        task = bar.add_task("sweep", total=num_replays, live="")

        def show(report: ReplayReport) -> None:
            bar.update(
                task,
                advance=1,
                live=f"{_describe(report)}: token hit rate {report.token_hit_rate:.1%}",
            )

        reports = run_sweep(settings, capacities, jobs or os.cpu_count() or 1, show, host_tiers)
    if json is not None:
        write_report(reports, json)
    console = Console()
    print_table(make_table(reports, console), console)
    draw_hit_rates(reports, picture)
    print(f"curve: {escape_text(picture)}")


def make_table(reports: list[ReplayReport], console: Console) -> Table:
    """One row per replay, with a bar for the token hit rate where the terminal has room for one."""
    table = _lay_out(reports, 0)
    room = console.width - measure_table(table, console).minimum - _AROUND_BAR
    bar_width = min(_BAR_WIDTH, room) if console.is_terminal else _BAR_WIDTH
    return table if bar_width < _MIN_BAR_WIDTH else _lay_out(reports, bar_width)


def _lay_out(reports: list[ReplayReport], bar_width: int) -> Table:
    has_tiers = any(report.tiers for report in reports)
    rows = [_make_row(report, has_tiers) for report in reports]
    table = Table(title=f"hit rate over capacity in blocks of {reports[0].block_size} tokens")
    for name in rows[0]:
        table.add_column(name, justify="right", no_wrap=True)
    if bar_width:
        table.add_column("", width=bar_width, no_wrap=True)
    for report, row in zip(reports, rows, strict=True):
        table.add_row(*row.values(), *["█" * round(bar_width * report.token_hit_rate)] * bool(bar_width))
    return table


def _make_row(report: ReplayReport, has_tiers: bool) -> dict[str, str]:
    token_hits = {"token hits": f"{report.token_hit_rate:.2%}"}
    if has_tiers:
        sizes = {"blocks": f"{report.num_blocks:,}", "host tier": f"{report.settings['host_tier']:,}"}
        share = sum(tier.tokens_hit for tier in report.tiers) / report.tokens_in
        others = {"from host": f"{share:.2%}", "refused": f"{report.refused_requests:,}"}
    else:
        sizes = {"blocks": f"{report.num_blocks:,}"}
        others = {
            "block hits": f"{report.block_hit_rate:.2%}",
            "refused": f"{report.refused_requests:,}",
            "preempted": f"{report.preempted:,}",
        }
    return sizes | token_hits | others | {"evictions": f"{report.evictions:,}"}


def _parse_numbers(option: str, text: str) -> list[int]:
    """The whole numbers of a list, each once, in order. Raises InvalidArgumentError."""
    try:
        return sorted({int(number.replace("_", "")) for number in text.split(",")})
    except ValueError as error:
        raise InvalidArgumentError(
            f"{option} {text!r} is not a list of whole numbers such as 1000,3000,10000"
        ) from error


def _describe(report: ReplayReport) -> str:
    tiers = "".join(f" and {tier.capacity:,} in a tier" for tier in report.tiers)
    return f"{report.num_blocks:,} blocks{tiers}"
