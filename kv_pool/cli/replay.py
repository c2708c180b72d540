"""`kv-pool replay`: replay a trace through a prefix cache of a given size."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kv_pool.cli import options
from kv_pool.cli.console import Column, Fact, make_table, new_facts_table, print_table, show_progress
from kv_pool.cli.foreign_text import escape_text
from kv_pool.cli.options import write_report
from kv_pool.cli.publishing import describe_publisher, open_publisher
from kv_pool.cli.setting_options import takes
from kv_pool.core.kv_events import MEDIUM_GPU
from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.event_feed import EVENTS_PANEL, EventFeed
from kv_pool.replay.pictures.figure import check_can_draw
from kv_pool.replay.pictures.hit_rates import draw_breakdowns
from kv_pool.replay.report import ReplayReport
from kv_pool.replay.request_outcomes import BreakdownRow, parse_breakdowns, write_outcomes
from kv_pool.replay.settings import ReplaySettings
from kv_pool.replay.simulator import run_replay
from kv_pool.replay.trace_writer import check_can_write

_ORDER = """
trace blocks memory model num_layers num_kv_heads head_size dtype_bytes block_size policy convention clock
prefill_rate decode_rate max_running speedup groups states chunk_tokens watermark keep_sessions keep_prefix
host_blocks preempt copy_rate host_tier disk_tier tier_write disk_rate limit trace_block_size
timestamp_unit skip_broken seed runs by png publish publish_replay publish_config pace json requests
"""

_MAX_BREAKDOWN_ROWS = 20
"""Maximum number of rows. The report contains all."""

_BAR_WIDTH = 16


@takes(ReplaySettings, _ORDER, num_blocks=0)
def replay(
    settings: ReplaySettings,
    capacity: options.CapacityOptions,
    publish: options.Publish = None,
    publish_replay: options.PublishReplay = None,
    publish_config: options.PublishConfig = None,
    pace: Annotated[
        float | None,
        typer.Option(
            metavar="REQUESTS_PER_S",
            help="With --publish: at most this many requests a second. Without it, an hour's trace takes "
            "seconds: start kv-pool events first.",
            rich_help_panel=EVENTS_PANEL,
        ),
    ] = None,
    json: options.JsonFile = None,
    png: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --by: draw the hit rates (.png, .svg, .pdf).")
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write one line of JSON per request to this file: hits, blocks, wait, outcome.",
        ),
    ] = None,
) -> None:
    """Replay a trace through the block pool and show the hit rates of the prefix cache."""
    settings, capacities = capacity.find(settings)
    if len(capacities) > 1:
        raise InvalidArgumentError(f"a replay has one capacity, not {len(capacities)}; use kv-pool sweep")
    settings.check()
    if settings.preemption == "swap" and not settings.host_blocks:
        raise InvalidArgumentError(
            "--preempt swap has no effect without --host-blocks: pass both, or neither"
        )
    if png is not None and not parse_breakdowns(settings.by or ""):
        raise InvalidArgumentError("--png draws what --by lists; pass --by, too")
    if png is not None:
        check_can_draw(png)
    if json is not None:
        check_can_write(json)
    if pace is not None and publish is None and publish_config is None:
        raise InvalidArgumentError("--pace is for events; pass --publish, too")
    # This block includes the output, so that the result is printed before the error of a truncated file.
    with nullcontext() if requests is None else write_outcomes(requests) as on_outcome:
        with ExitStack() as stack:
            publisher = stack.enter_context(open_publisher(publish, publish_replay, publish_config))
            feed = None
            if publisher is not None:
                feed = EventFeed(publisher, pace)
                print(f"in a second terminal: {describe_publisher(publisher)}", flush=True)
            notify = stack.enter_context(show_progress("replaying"))
            report = run_replay(settings, notify, feed, on_outcome)
        write_report(report, json)
        print_table(make_facts(report))
        for kind, rows in report.breakdowns.items():
            print_table(make_breakdown_table(kind, rows))
        if png is not None:
            draw_breakdowns(report, png)
            print(f"picture: {escape_text(png)}")


def make_facts(report: ReplayReport) -> Table:
    """Return a report as a table."""
    trace = escape_text(Path(report.provenance.trace).name) if report.provenance else ""
    is_compiled = report.provenance is not None and report.provenance.compiled
    policy, groups = (escape_text(str(report.settings.get(name))) for name in ("policy", "groups"))
    parts = [
        policy if policy != "lru" else "",
        f"clock {report.clock}",
        report.convention,
        groups if groups != "full" else "",
        f"core {'compiled' if is_compiled else 'plain'}",
        f"{report.wall_seconds:.1f} s",
    ]
    facts = [
        *_list_requests(report),
        None,
        *_list_hits(report),
        None,
        *_list_use(report),
        None,
        *_list_tiers(report),
        None,
        *(_list_waits(report) if report.clock == "trace" else []),
        None,
        *_list_calls(report),
    ]
    title = f"{trace} through {report.num_blocks:,} blocks of {report.block_size} tokens"
    return new_facts_table(title, facts, ", ".join(filter(None, parts)))


def _list_requests(report: ReplayReport) -> Iterator[Fact]:
    yield "requests", f"{report.requests:,}", ""
    yield "refused", f"{report.refused_requests:,}", "larger than the whole pool"
    if report.clock == "trace":
        yield "simulated time", f"{report.simulated_ms / 1000:,.0f} s", ""
    if report.late_requests:
        yield "late", f"{report.late_requests:,}", "timestamps that go backwards"
    if report.broken_lines:
        yield "broken lines", f"{report.broken_lines:,}", report.first_broken or ""


def _list_hits(report: ReplayReport) -> Iterator[Fact]:
    of_tokens = f"{report.tokens_hit:,} of {report.tokens_in:,} prompt tokens"
    yield "token hit rate", f"{report.token_hit_rate:.2%}", of_tokens
    if report.tiers:
        in_pool = report.tokens_hit - sum(tier.tokens_hit for tier in report.tiers)
        yield f"  from {MEDIUM_GPU}", f"{in_pool / report.tokens_in:.2%}", f"{in_pool:,} in the pool itself"
    for tier in report.tiers:
        share = tier.tokens_hit / report.tokens_in
        yield f"  from {tier.medium}", f"{share:.2%}", f"{tier.tokens_hit:,} onboarded"
    of_blocks = f"{report.blocks_hit:,} of {report.blocks_looked_up:,} full prompt blocks"
    yield "block hit rate", f"{report.block_hit_rate:.2%}", of_blocks
    yield "", f"{report.mean_request_token_hit_rate:.2%}", "of a request's tokens, mean over requests"
    yield "evictions", f"{report.evictions:,}", "cached blocks reused for other content"


def _list_use(report: ReplayReport) -> Iterator[Fact]:
    peak, mean = report.peak_blocks_in_use, report.mean_blocks_in_use
    over = "time" if report.clock == "trace" else "requests"
    yield "blocks in use, peak", f"{peak:,}", f"{peak / report.num_blocks:.1%} of the pool"
    yield "blocks in use, mean", f"{mean:,.0f}", f"{mean / report.num_blocks:.1%} of the pool, over {over}"
    if report.clock == "trace":
        yield "blocks in use, p99", f"{report.p99_blocks_in_use:,}", "not exceeded 99% of the time"
    yield "blocks per run", f"{report.blocks_per_run:.2f}", "consecutive ids in a block table"


def _list_tiers(report: ReplayReport) -> Iterator[Fact]:
    for tier in report.tiers:
        of_blocks = f"of {tier.capacity:,} blocks; {tier.evictions:,} evicted"
        yield f"{tier.medium} tier", f"{tier.blocks_held:,}", of_blocks
        moved = f", {tier.bytes_moved / 1e9:,.1f} GB in all" if tier.bytes_moved else ""
        yield "  written", f"{tier.blocks_written:,}", f"{tier.blocks_read:,} onboarded{moved}"


def _list_waits(report: ReplayReport) -> Iterator[Fact]:
    waiting = report.waiting
    others = f"median {_seconds(waiting.median_ms)}, p99 {_seconds(waiting.p99_ms)}"
    yield "running, mean", f"{report.mean_running:,.1f}", f"peak {report.peak_running:,}"
    yield "waited, mean", _seconds(waiting.mean_ms), others
    yield "preempted", f"{report.preempted:,}", "times a running request lost its blocks"
    yield "recomputed", f"{report.tokens_recomputed:,}", "tokens, after preemption"
    if report.swapped_out:
        moved = f"{report.blocks_swapped_out:,} blocks out, {report.blocks_swapped_in:,} back"
        yield "swapped out", f"{report.swapped_out:,}", "of the preempted, to host memory instead"
        yield "copied", f"{report.bytes_moved / 1e9:,.1f} GB", moved


def _list_calls(report: ReplayReport) -> Iterator[Fact]:
    for name, times in (("look up", report.look_up), ("allocate", report.allocate), ("free", report.free)):
        others = f"p99 {_microseconds(times.p99_ns)}, {times.calls:,} calls, {times.total_ns / 1e9:.2f} s"
        yield f"{name}, median", _microseconds(times.median_ns), others


def _seconds(duration_ms: float) -> str:
    return f"{duration_ms / 1000:,.1f} s"


def _microseconds(duration_ns: int) -> str:
    return f"{duration_ns / 1000:,.1f} µs"


def make_breakdown_table(kind: str, rows: Sequence[BreakdownRow]) -> Table:
    """Return the first rows of a breakdown as a table; of sessions and tenants those with the most tokens."""
    if kind in ("session", "tenant"):
        rows = sorted(rows, key=lambda row: -row.tokens_in)
    columns: list[Column] = [
        (kind, lambda row: _name_row(kind, row)),
        ("requests", lambda row: f"{row.requests:,}"),
        ("prompt tokens", lambda row: f"{row.tokens_in:,}"),
        ("token hits", lambda row: f"{row.token_hit_rate:.2%}"),
        ("block hits", lambda row: f"{row.block_hit_rate:.2%}"),
        ("", lambda row: "█" * round(_BAR_WIDTH * row.token_hit_rate)),
    ]
    num_more = len(rows) - _MAX_BREAKDOWN_ROWS
    return make_table(
        columns,
        rows[:_MAX_BREAKDOWN_ROWS],
        left=("", "session", "tenant"),
        title=f"hit rate by {kind}{' in the prompt, in tokens' if kind == 'position' else ''}",
        caption=f"{num_more:,} more rows in the file of --json" if num_more > 0 else None,
    )


def _name_row(kind: str, row: BreakdownRow) -> str:
    if row.key is None:
        return "none"
    if kind == "position" and isinstance(row.key, int):
        return f"{row.key:,} to {2 * row.key - 1 if row.key else 1023:,}"
    return f"{row.key:,}" if isinstance(row.key, int) else row.key
