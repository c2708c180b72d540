"""`kv-pool sweep`: the hit rate over the size of the cache."""

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.table import Table

from kv_pool.cli import options
from kv_pool.cli.progress import make_progress_bar
from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.plot import check_can_draw, draw_hit_rates
from kv_pool.replay.replay_request import CONVENTIONS
from kv_pool.replay.report import ReplayReport, write_json
from kv_pool.replay.simulator import ReplaySettings
from kv_pool.replay.sweep import run_sweep
from kv_pool.replay.trace_clock import EngineRates

_BAR_WIDTH = 16


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
    limit: options.Limit = None,
    trace_block_size: options.TraceBlockSize = None,
    timestamp_unit: options.TimestampUnit = "ms",
    skip_broken: options.SkipBroken = False,
    seed: options.Seed = "0",
    json: options.JsonFile = None,
    png: Annotated[str, typer.Option(help="Where to draw the curve.")] = "sweep.png",
    jobs: Annotated[int, typer.Option(help="Processes; 0 for one per core.", min=0)] = 0,
) -> None:
    """Replay a trace at several capacities in parallel, and draw the hit-rate curve."""
    try:
        capacities = sorted({int(text.replace("_", "")) for text in blocks.split(",")})
    except ValueError as error:
        raise InvalidArgumentError(
            f"--blocks {blocks!r} is not a list of whole numbers such as 1000,3000,10000"
        ) from error
    check_can_draw(png)
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
    )
    with make_progress_bar("sweeping", MofNCompleteColumn()) as bar:
        task = bar.add_task("sweep", total=len(capacities), live="")

        def show(report: ReplayReport) -> None:
            bar.update(
                task,
                advance=1,
                live=f"{report.num_blocks:,} blocks: token hit rate {report.token_hit_rate:.1%}",
            )

        reports = run_sweep(settings, capacities, jobs or os.cpu_count() or 1, show)
    if json is not None:
        write_json(reports, json)
    draw_hit_rates(reports, png)
    console = Console()
    console.print(make_table(reports))
    console.print(f"curve: {png}", highlight=False)


def make_table(reports: list[ReplayReport]) -> Table:
    """One row per capacity, with a bar for the token hit rate."""
    table = Table(title=f"hit rate over capacity in blocks of {reports[0].block_size} tokens")
    for name in ("blocks", "token hits", "block hits", "refused", "preempted", "evictions"):
        table.add_column(name, justify="right")
    table.add_column("")
    for report in reports:
        table.add_row(
            f"{report.num_blocks:,}",
            f"{report.token_hit_rate:.2%}",
            f"{report.block_hit_rate:.2%}",
            f"{report.refused_requests:,}",
            f"{report.preempted:,}",
            f"{report.evictions:,}",
            "█" * round(_BAR_WIDTH * report.token_hit_rate),
        )
    return table
