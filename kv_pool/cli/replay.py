"""`kv-pool replay`, `sweep`: replay a trace through a prefix cache of a given size, or of several sizes."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

from kv_pool.cli import options
from kv_pool.cli.console import show_progress
from kv_pool.cli.publishing import describe_publisher, open_publisher
from kv_pool.cli.setting_options import takes
from kv_pool.core.kv_events import MEDIUM_GPU
from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.event_feed import EventFeed
from kv_pool.lab.pictures.hit_rates import draw_breakdowns, draw_hit_rates
from kv_pool.lab.report import CallTimes, ReplayReport, TierReport, read_reports
from kv_pool.lab.request_outcomes import BreakdownRow, parse_breakdowns, write_outcomes
from kv_pool.lab.settings import TIERS_PANEL, ReplaySettings
from kv_pool.lab.simulator import run_replay
from kv_pool.lab.sweep import run_sweep
from kv_pool.lab.tables import (
    Column,
    Fact,
    Report,
    ReportTable,
    draw_bar,
    make_facts,
    make_record,
    make_table,
    show_share,
)
from kv_pool.loggers import get_logger
from kv_pool.option import setting
from kv_pool.shared_options import EVENTS_PANEL, PUBLISH, PUBLISH_CONFIG, PUBLISH_REPLAY

_REPLAY_ORDER = """
trace blocks memory model num_layers num_kv_heads head_size dtype_bytes block_size policy convention clock
prefill_rate decode_rate max_running speedup groups states chunk_tokens watermark keep_sessions keep_prefix
host_blocks preempt copy_rate host_tier disk_tier tier_write disk_rate limit trace_block_size
timestamp_unit skip_broken seed runs by png publish publish_replay publish_config pace json csv requests
metrics
"""


@takes(_REPLAY_ORDER, num_blocks=0)
def replay(
    settings: ReplaySettings,
    capacity: options.CapacityOptions,
    outputs: options.Outputs,
    publish: str | None = setting(PUBLISH, default=None),
    publish_replay: str | None = setting(PUBLISH_REPLAY, default=None),
    publish_config: str | None = setting(PUBLISH_CONFIG, default=None),
    pace: float | None = setting(
        "With --publish: at most this many requests a second. Without it, an hour's trace takes seconds: "
        "start kv-pool events first.",
        default=None,
        metavar="REQUESTS_PER_S",
        panel=EVENTS_PANEL,
    ),
    requests: str | None = setting(
        "Write one line of JSON per request to this file: hits, blocks, wait, outcome.",
        default=None,
        metavar="FILE",
    ),
    metrics: str | None = setting(
        "Serve the metrics for Prometheus at this port of 127.0.0.1 while the replay runs, or write them to "
        "this file at its end.",
        default=None,
        metavar="PORT|FILE",
    ),
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
    if outputs.png is not None and not parse_breakdowns(settings.by or ""):
        raise InvalidArgumentError("--png draws what --by lists; pass --by, too")
    outputs.check()
    if pace is not None and publish is None and publish_config is None:
        raise InvalidArgumentError("--pace is for events; pass --publish, too")
    get_logger("kv_pool.core").setLevel(logging.CRITICAL)  # the replay raises the error
    # This block includes the output, so that the result is printed before the error of a truncated file.
    with nullcontext() if requests is None else write_outcomes(requests) as on_outcome:
        with ExitStack() as stack:
            publisher = stack.enter_context(open_publisher(publish, publish_replay, publish_config))
            feed = None
            if publisher is not None:
                feed = EventFeed(publisher, pace)
                print(f"in a second terminal: {describe_publisher(publisher)}", flush=True)
            notify = stack.enter_context(show_progress("replaying"))
            on_start = None
            if metrics is not None:
                from kv_pool.cli.replay_metrics import export_metrics  # needs prometheus_client

                exported = export_metrics(metrics, capacity.model or "replay", notify)
                on_start, notify = stack.enter_context(exported)
            report = run_replay(settings, notify, feed, on_outcome, on_start=on_start)
        outputs.write(report_replay(report), partial(draw_breakdowns, report))


_SWEEP_ORDER = """
trace blocks memory model num_layers num_kv_heads head_size dtype_bytes block_size policy convention clock
prefill_rate decode_rate max_running speedup groups states chunk_tokens watermark keep_sessions
keep_prefix host_tier disk_tier copy_rate disk_rate tier_write limit trace_block_size timestamp_unit
skip_broken seed json csv png overlay jobs
"""


@takes(_SWEEP_ORDER, num_blocks=0)
def sweep(
    settings: ReplaySettings,
    capacity: options.CapacityOptions,
    outputs: options.Outputs,
    host_tier: str = setting(
        "Capacities in blocks of a tier in host memory, combined with each capacity of the pool: 0,10k,30k. "
        "With the trace clock it needs --model or dimensions.",
        default="0",
        metavar="LIST",
        panel=TIERS_PANEL,
    ),
    disk_tier: str = setting(
        "Capacities of a tier on disk below it, combined with each of the others.",
        default="0",
        metavar="LIST",
        panel=TIERS_PANEL,
    ),
    overlay: list[str] | None = setting(
        "With --png: draw an earlier sweep, too, from its --json file. May be repeated.",
        default=None,
        metavar="FILE",
    ),
    jobs: int = setting(options.JOBS, default=0),
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


_MAX_BREAKDOWN_ROWS = 20
"""Maximum number of rows. The report contains all."""

_HITS = (
    Column("token hits", "token_hit_rate", show_share),
    Column("block hits", "block_hit_rate", show_share),
    Column("", "token_hit_rate", draw_bar),
)


def report_replay(found: ReplayReport) -> Report:
    """Return a replay as a table of facts, and one of each breakdown."""
    breakdowns = [_tabulate_breakdown(kind, rows) for kind, rows in found.breakdowns.items()]
    return Report(found, [_tabulate_replay(found), *breakdowns], records=[_make_row(found)])


def _make_row(found: ReplayReport) -> dict[str, object]:
    """Return the row of a replay in a CSV file: its counts, without breakdowns and single tiers."""
    first = {name: found.settings[name] for name in ("policy", "host_tier", "disk_tier")}
    row = make_record(found, int(found.settings["block_bytes"]) or None, **first)
    return {
        name: value
        for name, value in row.items()
        if not isinstance(value, (list, dict)) and not name.startswith("provenance")
    }


def _tabulate_replay(found: ReplayReport) -> ReportTable:
    trace = Path(found.provenance.trace).name if found.provenance else ""
    is_compiled = found.provenance is not None and found.provenance.compiled
    policy, groups = (str(found.settings.get(name)) for name in ("policy", "groups"))
    parts = [
        policy if policy != "lru" else "",
        f"clock {found.clock}",
        found.convention,
        groups if groups != "full" else "",
        f"core {'compiled' if is_compiled else 'plain'}",
        f"{found.wall_seconds:.1f} s",
    ]
    facts = [
        *_list_requests(found),
        None,
        *_list_hits(found),
        None,
        *_list_use(found),
        None,
        *(fact for tier in found.tiers for fact in _list_tier(tier)),
        None,
        *(_list_waits(found) if found.clock == "trace" else []),
        None,
        _describe_calls("look up", found.look_up),
        _describe_calls("allocate", found.allocate),
        _describe_calls("free", found.free),
    ]
    title = f"{trace} through {found.num_blocks:,} blocks of {found.block_size} tokens"
    return make_facts(title, facts, ", ".join(filter(None, parts)))


def _list_requests(found: ReplayReport) -> Iterator[Fact]:
    yield Fact("requests", f"{found.requests:,}")
    yield Fact("refused", f"{found.refused_requests:,}", "larger than the whole pool")
    if found.clock == "trace":
        yield Fact("simulated time", f"{found.simulated_ms / 1000:,.0f} s")
    if found.late_requests:
        yield Fact("late", f"{found.late_requests:,}", "timestamps that go backwards")
    if found.broken_lines:
        yield Fact("broken lines", f"{found.broken_lines:,}", found.first_broken or "")


def _list_hits(found: ReplayReport) -> Iterator[Fact]:
    of_tokens = f"{found.tokens_hit:,} of {found.tokens_in:,} prompt tokens"
    yield Fact("token hit rate", f"{found.token_hit_rate:.2%}", of_tokens)
    if found.tiers:
        in_pool = found.tokens_hit - sum(tier.tokens_hit for tier in found.tiers)
        share = f"{in_pool / found.tokens_in:.2%}"
        yield Fact(f"  from {MEDIUM_GPU}", share, f"{in_pool:,} in the pool itself")
    for tier in found.tiers:
        share = f"{tier.tokens_hit / found.tokens_in:.2%}"
        yield Fact(f"  from {tier.medium}", share, f"{tier.tokens_hit:,} onboarded")
    of_blocks = f"{found.blocks_hit:,} of {found.blocks_looked_up:,} full prompt blocks"
    yield Fact("block hit rate", f"{found.block_hit_rate:.2%}", of_blocks)
    yield Fact("", f"{found.mean_request_token_hit_rate:.2%}", "of a request's tokens, mean over requests")
    yield Fact("evictions", f"{found.evictions:,}", "cached blocks reused for other content")


def _list_use(found: ReplayReport) -> Iterator[Fact]:
    peak, mean = found.peak_blocks_in_use, found.mean_blocks_in_use
    over = "time" if found.clock == "trace" else "requests"
    yield Fact("blocks in use, peak", f"{peak:,}", f"{peak / found.num_blocks:.1%} of the pool")
    of_pool = f"{mean / found.num_blocks:.1%} of the pool, over {over}"
    yield Fact("blocks in use, mean", f"{mean:,.0f}", of_pool)
    if found.clock == "trace":
        yield Fact("blocks in use, p99", f"{found.p99_blocks_in_use:,}", "not exceeded 99% of the time")
    yield Fact("blocks per run", f"{found.blocks_per_run:.2f}", "consecutive ids in a block table")


def _list_tier(tier: TierReport) -> Iterator[Fact]:
    of_blocks = f"of {tier.capacity:,} blocks; {tier.evictions:,} evicted"
    yield Fact(f"{tier.medium} tier", f"{tier.blocks_held:,}", of_blocks)
    moved = f", {tier.bytes_moved / 1e9:,.1f} GB in all" if tier.bytes_moved else ""
    yield Fact("  written", f"{tier.blocks_written:,}", f"{tier.blocks_read:,} onboarded{moved}")


def _list_waits(found: ReplayReport) -> Iterator[Fact]:
    waiting = found.waiting
    others = f"median {_seconds(waiting.median_ms)}, p99 {_seconds(waiting.p99_ms)}"
    yield Fact("running, mean", f"{found.mean_running:,.1f}", f"peak {found.peak_running:,}")
    yield Fact("waited, mean", _seconds(waiting.mean_ms), others)
    yield Fact("preempted", f"{found.preempted:,}", "times a running request lost its blocks")
    yield Fact("recomputed", f"{found.tokens_recomputed:,}", "tokens, after preemption")
    if found.swapped_out:
        moved = f"{found.blocks_swapped_out:,} blocks out, {found.blocks_swapped_in:,} back"
        yield Fact("swapped out", f"{found.swapped_out:,}", "of the preempted, to host memory instead")
        yield Fact("copied", f"{found.bytes_moved / 1e9:,.1f} GB", moved)


def _describe_calls(name: str, times: CallTimes) -> Fact:
    others = f"p99 {_microseconds(times.p99_ns)}, {times.calls:,} calls, {times.total_ns / 1e9:.2f} s"
    return Fact(f"{name}, median", _microseconds(times.median_ns), others)


def _seconds(duration_ms: float) -> str:
    return f"{duration_ms / 1000:,.1f} s"


def _microseconds(duration_ns: int) -> str:
    return f"{duration_ns / 1000:,.1f} µs"


def _tabulate_breakdown(kind: str, rows: Sequence[BreakdownRow]) -> ReportTable:
    """Return the first rows of a breakdown; of sessions and tenants those with the most tokens."""
    if kind in ("session", "tenant"):
        rows = sorted(rows, key=lambda row: -row.tokens_in)
    num_more = len(rows) - _MAX_BREAKDOWN_ROWS
    columns = (
        Column(kind, lambda row: _name_row(kind, row), str),
        Column("requests", "requests"),
        Column("prompt tokens", "tokens_in"),
        *_HITS,
    )
    return make_table(
        columns,
        rows[:_MAX_BREAKDOWN_ROWS],
        texts=("session", "tenant", ""),
        title=f"hit rate by {kind}{' in the prompt, in tokens' if kind == 'position' else ''}",
        caption=f"{num_more:,} more rows in the file of --json" if num_more > 0 else "",
        has_bars=True,
    )


def _name_row(kind: str, row: BreakdownRow) -> str:
    if row.key is None:
        return "none"
    if kind == "position" and isinstance(row.key, int):
        return f"{row.key:,} to {2 * row.key - 1 if row.key else 1023:,}"
    return f"{row.key:,}" if isinstance(row.key, int) else row.key


def report_sweep(reports: list[ReplayReport]) -> Report:
    """Return replays at several capacities as a table with a row for each."""
    has_host, has_disk = (
        any(found.settings[name] for found in reports) for name in ("host_tier", "disk_tier")
    )
    tokens, blocks, bars = _HITS
    refused = Column("refused", "refused_requests")
    columns = [Column("blocks", "num_blocks")]
    if has_host:
        columns.append(Column("host tier", lambda found: found.settings["host_tier"]))
    if has_disk:
        columns.append(Column("disk tier", lambda found: found.settings["disk_tier"]))
    columns.append(tokens)
    if has_host or has_disk:
        columns += [Column("from tiers" if has_disk else "from host", _find_tier_share, show_share), refused]
    else:
        columns += [blocks, refused, Column("preempted", "preempted")]
    bound = reports[0].infinite_cache
    caption = ""
    if bound is not None:
        caption = f"an infinite cache: {bound.token_hit_rate:.2%} token hits, {bound.num_blocks:,} blocks"
    table = make_table(
        [*columns, Column("evictions", "evictions"), bars],
        reports,
        title=f"hit rate over capacity in blocks of {reports[0].block_size} tokens",
        caption=caption,
        has_bars=True,
    )
    return Report(reports, [table], records=[_make_row(found) for found in reports])


def _find_tier_share(found: ReplayReport) -> float:
    return sum(tier.tokens_hit for tier in found.tiers) / found.tokens_in
