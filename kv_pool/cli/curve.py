"""`kv-pool curve`: the hit rate of LRU and of the optimum over the size of the cache, from one reading."""

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer
from rich.table import Table

from kv_pool.cli import options
from kv_pool.cli.console import Column, make_table, print_table, show_progress
from kv_pool.cli.foreign_text import escape_text, make_cell
from kv_pool.cli.options import choose_files, write_report
from kv_pool.cli.setting_options import takes
from kv_pool.replay.curves.curve_report import (
    CurvePoint,
    CurveReport,
    choose_in_steps,
    describe_bound,
    write_csv,
)
from kv_pool.replay.curves.measure import measure_curves
from kv_pool.replay.pictures.hit_rates import draw_curves
from kv_pool.replay.settings import ReplaySettings

_MAX_ROWS = 14

_ORDER = """
trace blocks memory model num_layers num_kv_heads head_size dtype_bytes block_size convention limit
trace_block_size timestamp_unit skip_broken seed sample json csv png
"""


@takes(ReplaySettings, _ORDER, num_blocks=1)
def curve(
    settings: ReplaySettings,
    capacity: options.CapacityOptions,
    sample: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="Estimate the hit rates, with standard errors, from this share of the sessions, or of the "
            "prompts by their first block after a common system prompt: 0.1.",
        ),
    ] = None,
    json: options.JsonFile = None,
    csv: Annotated[str | None, typer.Option(help="Write one row per capacity to this file.")] = None,
    png: Annotated[str | None, options.declare_picture("curves", "curve")] = None,
) -> None:
    """Compute the hit rate of LRU and of optimal replacement at many capacities in seconds.

    Default capacities: 64 in equal ratios, from the largest request to the least with all hits of LRU.
    """
    capacities = None
    if capacity.blocks is None and capacity.memory is None:
        settings, _ = replace(capacity, blocks="1").find(settings)
    else:
        settings, capacities = capacity.find(settings)
    picture = choose_files("curve.png", png, json, csv)
    with show_progress("computing curves") as notify:
        report = measure_curves(settings, capacities, notify, sample)
    write_report(report, json)
    if csv is not None:
        write_csv(report, csv)
    print_table(make_points_table(report))
    for line in describe(report):
        print(line)
    draw_curves(report, picture)
    print(f"curve: {escape_text(picture)}")


def make_points_table(report: CurveReport) -> Table:
    """Return a table with one row per capacity; of many capacities, some in equal steps and the knee."""
    columns: list[Column] = [
        ("blocks", lambda point: f"{point.num_blocks:,}"),
        ("refused", lambda point: f"{point.refused_requests:,}"),
    ]
    for kind, state in (("token", report.optimum_tokens), ("block", report.optimum_blocks)):
        columns.append((f"LRU {kind}s", partial(_show_rate, report, kind, "lru")))
        optimum = "optimum" if state == "optimal" else "bound"
        columns.append((f"{optimum} {kind}s", partial(_show_rate, report, kind, "optimum")))
    columns.append(("", lambda point: "knee" if point.num_blocks == report.knee else ""))
    ceiling = report.infinite_cache
    caption = (
        f"an infinite cache: {ceiling.token_hit_rate:.2%} of tokens, {ceiling.block_hit_rate:.2%} of blocks, "
        f"{ceiling.num_blocks:,} blocks{'' if report.sample is None else ' in the sample'}"
    )
    title = f"hit rate over capacity in blocks of {report.block_size} tokens"
    points = report.points
    if len(points) > _MAX_ROWS:
        chosen = choose_in_steps([point.num_blocks for point in points], _MAX_ROWS - 1, report.knee)
        points = [point for point in points if point.num_blocks in chosen]
    return make_table(columns, points, title=title, caption=caption)


def _show_rate(report: CurveReport, kind: str, policy: str, point: CurvePoint) -> str:
    counts = getattr(point, policy)
    error = "" if report.sample is None else f" ±{getattr(counts, f'{kind}_rate_error'):.2%}"
    return f"{getattr(counts, f'{kind}_hit_rate'):.2%}{error}"


def describe(report: CurveReport) -> list[str]:
    """Return sentences about the knee, about bounds, and about skipped lines."""
    lines = []
    if report.sample is not None:
        lines.append(
            f"estimated from {report.sample.requests:,} of {report.requests:,} requests, sampled by "
            f"{report.sample.unit}; ± is one standard error"
        )
    for point in report.points:
        if point.num_blocks == report.knee:
            size = _describe_size(point, report)
            optimum = "optimum" if report.optimum_tokens == "optimal" else "upper bound"
            lines.append(
                f"knee: {size}, {point.lru.token_hit_rate:.2%} of tokens with LRU, "
                f"{point.optimum.token_hit_rate:.2%} with the {optimum}, "
                f"{report.infinite_cache.token_hit_rate:.2%} without evictions"
            )
    lines += describe_bound(report.optimum_blocks, report.optimum_tokens)
    if report.points[0].num_blocks < report.largest_request:
        lines.append(f"below {report.largest_request:,} blocks, pools refuse requests that are larger")
    if report.broken_lines:
        lines.append(f"broken lines: {report.broken_lines:,}; {make_cell(report.first_broken or '').plain}")
    return lines


def _describe_size(point: CurvePoint, report: CurveReport) -> str:
    block_bytes = report.settings.get("block_bytes")
    memory = f" ({point.num_blocks * int(block_bytes) / 2**30:,.1f} GiB)" if block_bytes else ""
    return f"{point.num_blocks:,} blocks{memory}"
