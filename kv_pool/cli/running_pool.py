"""The commands about a running pool: send one over its control socket, and print the answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.text import Text

from kv_pool.cli.console import (
    describe_bytes,
    encode_json_line,
    print_json,
    print_report,
    refresh_forever,
)
from kv_pool.cli.setting_options import AS_JSON, takes
from kv_pool.control.client import ControlClient
from kv_pool.control.layout_drawing import draw_layout, print_layout
from kv_pool.drawing import check_can_draw
from kv_pool.errors import DrawingError
from kv_pool.ids import BlockId, NodeName
from kv_pool.lab.tables import Column, Report, ReportTable, make_table
from kv_pool.option import Option, setting
from kv_pool.reports import (
    HoldList,
    HoldSummary,
    LiveCurvePoint,
    LiveCurveReport,
    PoolStatistics,
    SequenceList,
)
from kv_pool.reports.allocation_monitor import PoolHistory
from kv_pool.reports.latency import CallLatency

WATCH = Option("Refresh until Ctrl-C.")

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class RunningPool:
    """The running pool that a command is for, and whether to print what it answers as JSON."""

    socket: str | None = setting(
        "The pool's control socket. Default: the socket of this user's kv-pool serve.", default=None
    )
    node: str | None = setting(
        "The node to connect to: its kv-pool serve --name.", default=None, metavar="NAME"
    )
    json: bool = setting(AS_JSON, default=False)

    def connect(self, not_node: NodeName | None = None, **options: float) -> ControlClient:
        """Return a client of the pool, with options of `ControlClient`. Raises what it raises."""
        node = None if self.node is None else NodeName(self.node)
        return ControlClient(self.socket, node=node, not_node=not_node, **options)

    def ask(self, question: Callable[[ControlClient], _Answer]) -> _Answer:
        """Return what `question` returns for a client of the pool."""
        with self.connect() as client:
            return question(client)


@takes("watch history socket node json")
def stats(
    pool: RunningPool,
    watch: bool = setting(WATCH, default=False),
    history: bool = setting("Show the use and the rates of the last 1, 5 and 15 minutes.", default=False),
) -> None:
    """Show the counts, shares and latencies of a running pool, or its rates."""
    with pool.connect() as client:

        def look() -> str:
            found = client.get_history() if history else client.get_statistics()
            if pool.json:
                return encode_json_line(found)
            if isinstance(found, PoolHistory):
                return "\n".join(describe_history(found))
            return "\n  ".join(["KV Pool Statistics:", *describe_statistics(found)])

        if watch:
            refresh_forever(lambda: [Text(look())], Console(highlight=False))
        print(look())


def describe_statistics(statistics: PoolStatistics) -> list[str]:
    """Return statistics as lines of text."""
    s = statistics
    lines = [
        f"Total Blocks: {s.total_blocks} of {s.block_size} tokens",
        f"Used Blocks: {s.used_blocks} ({s.utilization:.1%})",
        f"Free Blocks: {s.free_blocks} ({s.free_blocks / s.total_blocks:.1%}), "
        f"{s.cached_free_blocks} of them cached",
        f"Pinned Blocks: {s.pinned_blocks}",
        f"Reserved Blocks: {s.reserved_blocks}",
    ]
    if s.immovable_blocks not in (0, s.pinned_blocks):
        lines.append(f"Held in Place: {s.immovable_blocks} of the used blocks; see kv-pool sequences --holds")
    if s.num_sequences is not None:
        evicted = "" if s.evicted_sequences is None else f", evicted so far: {s.evicted_sequences}"
        lines.append(f"Sequences: {s.num_sequences}{evicted}")
    lines += [
        f"Fragmentation Rate: {s.fragmentation_rate:.1%} (runs of {s.run_length})",
        f"Largest Free Run: {s.largest_free_run} blocks, outside of it: {s.largest_run_loss:.1%}",
        f"Moved Blocks: {s.moved_blocks}, epoch {s.epoch}",
        f"Prefix Cache: {_describe_hits(s)}{s.evicted_blocks} evicted",
    ]
    if s.live_curve is not None:
        lines += _describe_curve(s.live_curve)
    if s.queued_events or s.taken_events is not None:
        taken = "".join(f", {count} {kind}" for kind, count in sorted((s.taken_events or {}).items()))
        lines.append(f"Events: {s.queued_events} queued{taken}")
    if s.allocation is not None:
        lines += _describe_latency("Allocation Latency", s.allocation)
    if s.freeing is not None:
        lines += _describe_latency("Free Latency", s.freeing)
    return lines


def describe_history(history: PoolHistory) -> list[str]:
    """Return a history as a table in lines of text."""
    windows = history.windows
    rows = {"KV Pool History": [f"{window.window_s // 60} min" for window in windows]}
    rows["Covered"] = [f"{window.covered_s:.0f} s" for window in windows]
    rows["Used Blocks (avg)"] = [f"{window.utilization:.1%}" for window in windows]
    rows["Used Blocks (max)"] = [f"{window.peak_utilization:.1%}" for window in windows]
    rows["Hit Rate"] = [_show_hit_rate(window.rates) for window in windows]
    for name in history.states[-1].counters:
        title = f"{name.replace('_', ' ').title()}/s"
        rows[title] = [f"{window.rates[name]:,.1f}" if window.rates else "-" for window in windows]
    return [f"{title:<22}" + "".join(f" {cell:>11}" for cell in cells) for title, cells in rows.items()]


def _show_hit_rate(rates: dict[str, float]) -> str:
    looked_up = rates.get("looked_up_tokens")
    return f"{rates['hit_tokens'] / looked_up:.1%}" if looked_up else "-"


def _describe_hits(statistics: PoolStatistics) -> str:
    hit, looked_up = statistics.hit_blocks, statistics.looked_up_blocks
    if hit is None or looked_up is None:
        return ""
    share = f" ({hit / looked_up:.1%})" if looked_up else ""
    return f"{hit} of {looked_up} blocks hit{share}, "


def _describe_curve(curve: LiveCurveReport) -> list[str]:
    """Return the changes for more and fewer blocks as lines that fit into 80 columns."""
    more, fewer = curve.get_point(1.2), curve.get_point(0.8)
    if more is None or fewer is None:
        return [f"Live Curve: not known yet, {curve.looked_up_blocks:.0f} blocks looked up"]
    lines = [f"Live Curve: {_describe_change('20% more', more, curve)}"]
    lines.append(f"  {_describe_change('20% fewer', fewer, curve)}")
    lines.append(
        f"  hits of blocks: {curve.block_hit_rate:.1%} measured, {curve.estimated_block_hit_rate:.1%} "
        f"(± {100 * curve.estimated_error:.1f}) by the sample"
    )
    seconds = curve.half_life_seconds
    time = "" if seconds is None else f", {seconds:,.0f} s at this rate"
    lines.append(f"  look-ups count half after {curve.half_life_blocks:,} others{time}")
    return lines


def _describe_change(what: str, point: LiveCurvePoint, curve: LiveCurveReport) -> str:
    change = 100 * abs(point.token_hit_rate - curve.token_hit_rate)
    kind = "more" if point.multiple > 1 else "fewer"
    return f"{what} blocks would give {change:.1f} points {kind} (± {100 * point.token_rate_error:.1f})"


def _describe_latency(title: str, latency: CallLatency) -> list[str]:
    """Return a latency as lines that fit into 80 columns."""
    if not latency.num_timed:
        return [f"{title}: not known yet, {latency.num_calls} calls"]
    return [
        f"{title}: {latency.mean_us:.1f}µs (avg), {latency.median_us:.1f}µs (median), "
        f"{latency.p99_us:.1f}µs (p99)",
        f"  {latency.max_us:.1f}µs (max), {latency.num_timed} of {latency.num_calls} calls timed",
    ]


@takes("max_moves max_evictions socket node json")
def defrag(
    pool: RunningPool,
    max_moves: int | None = setting(
        "Stop after moving this many blocks; repeat the command to continue.", default=None, min=1
    ),
    max_evictions: int = setting(
        "Cached blocks that may be evicted where that saves copies. Default: none.", default=0, min=0
    ),
) -> None:
    """Compact a running pool and show the result."""
    report = pool.ask(lambda client: client.defragment(max_moves, max_evictions))
    shown = [
        "Defragmentation complete:",
        f"  Moved Blocks: {report.moved_blocks}",
        f"  Time: {report.time_ms:.1f}ms",
        f"  Fragmentation Rate: {report.fragmentation_rate_before:.1%} → "
        f"{report.fragmentation_rate_after:.1%} (runs of {report.run_length})",
    ]
    if not report.moved_blocks and report.fragmentation_rate_after:
        why = "the blocks are compact, or held in place"
        if max_moves == 1:
            why = "exchanging two blocks takes two moves"
        shown.append(f"  Nothing moved: {why}.")
    print_report(Report(report, shown), pool.json)


@takes("socket node width output json")
def layout(
    pool: RunningPool,
    width: int | None = setting(
        "Cells per row in the terminal. Default: the largest power of two that fits.", default=None, min=1
    ),
    output: str | None = setting(
        "Draw to this .svg or .png file instead.", default=None, flags=("--output", "-o")
    ),
) -> None:
    """Draw which blocks of a running pool are free, cached, in use or held in place, and its runs."""
    if output is not None:
        check_can_draw(output, DrawingError)
    found = pool.ask(ControlClient.get_layout)
    if output is not None:
        draw_layout(found, output)
    if pool.json:
        print_json(found)
    elif output is None:
        print_layout(found, Console(), width)
    else:
        print(f"memory map: {output}")


@takes("holds block socket node json")
def sequences(
    pool: RunningPool,
    holds: bool = setting("List the holds that keep blocks in place instead, and their ages.", default=False),
    block: int | None = setting("List the holds on this block instead.", default=None, metavar="ID", min=1),
) -> None:
    """List the sequences, or requests, of a running pool, least recently used first.

    The requests of a KVCacheManager are listed in the order of their admission.
    """
    found: SequenceList | HoldList
    if holds or block is not None:
        found = pool.ask(lambda client: client.list_holds(None if block is None else BlockId(block)))
        listed = _list_holds(found)
    else:
        found = pool.ask(ControlClient.describe_sequences)
        listed = _list_sequences(found)
    print_report(Report(found, [listed]), pool.json, box=box.SIMPLE)


def _list_sequences(found: SequenceList) -> ReportTable:
    columns = (
        Column("sequence", "sequence_id", str),
        Column("blocks", "num_blocks"),
        Column("held in place", lambda one: one.num_immovable_blocks or None),
        Column("tokens", "num_tokens"),
        Column("priority", "priority"),
        Column("last used", "idle_s", "{:.1f} s ago".format),
        Column("", lambda one: "in transit" if one.is_in_transit else None, str),
    )
    known = [one for one in columns if any(map(one.make_cell, found.sequences))] or columns
    return make_table(known, found.sequences)


def _list_holds(found: HoldList) -> ReportTable:
    columns = (
        Column("blocks", "num_blocks"),
        Column("ids", _list_ids, Text),
        Column("held for", "age_s", "{:.1f} s".format),
        Column("until", "remaining_s", "in {:.1f} s".format),
        Column("", _name_kind, str),
        Column("held as", "reason", str),
    )
    return make_table(columns, found.holds, texts=("ids", "until", "", "held as"))


def _list_ids(hold: HoldSummary) -> str:
    return ", ".join(map(str, hold.block_ids)) + ", ..." * (hold.num_blocks > len(hold.block_ids))


def _name_kind(hold: HoldSummary) -> str:
    if hold.is_quarantined:
        return "quarantined"
    if not hold.has_references:
        return "id only"
    return "movable" if hold.is_movable else ""


@takes()
def tiers(pool: RunningPool) -> None:
    """Show the lower tiers of a running pool, fastest first."""
    found = pool.ask(ControlClient.list_tiers)
    columns = (
        Column("tier", "medium", str),
        Column("blocks", lambda tier: f"{tier.num_blocks:,} of {tier.capacity:,}", str),
        Column("bytes", lambda tier: tier.num_blocks * tier.block_bytes, describe_bytes),
        Column("stored", "num_stored"),
        Column("read", "num_read"),
        Column("removed", "num_removed"),
        Column("errors", lambda tier: tier.num_read_errors + tier.num_write_errors),
    )
    hits = ", ".join(f"{medium} {count:,}" for medium, count in found.hit_blocks.items())
    shown = (
        make_table(columns, found.tiers, texts=("tier",)),
        f"hit blocks by medium: {hits}; {found.num_dropped:,} evicted blocks were not offloaded",
    )
    print_report(Report(found, shown), pool.json, box=box.SIMPLE, padding=(0, 1, 0, 0))


@takes()
def peers(pool: RunningPool) -> None:
    """Show the other nodes that a running node knows."""
    found = pool.ask(ControlClient.list_peers)
    others = "1 other node" if len(found.peers) == 1 else f"{len(found.peers)} other nodes"
    titles = ("node", "address", "nearness", "free blocks", "round trip")
    rows = [
        (peer.name, peer.address, "no answer", None, None)
        if peer.error
        else (
            peer.name,
            peer.address,
            peer.nearness if peer.nearness == "elsewhere" else f"same {peer.nearness}",
            f"{peer.num_free_blocks:,} of {peer.num_blocks:,}",
            f"{peer.round_trip_ms:.1f} ms",
        )
        for peer in found.peers
    ]
    shown: list[ReportTable | str] = [
        f"node {found.name} at {found.address} knows {others}",
        *([ReportTable(titles, rows, titles[:3])] if rows else []),
        *(f"{peer.name}: {peer.error}" for peer in found.peers if peer.error),
    ]
    print_report(Report(found, shown), pool.json, box=box.SIMPLE)
