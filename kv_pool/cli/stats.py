"""`kv-pool stats`: show the use, fragmentation and latencies of a running pool."""

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kv_pool.cli import watching
from kv_pool.cli.console import encode_json_line
from kv_pool.cli.control_options import Json, Node, Socket
from kv_pool.control.client import ControlClient
from kv_pool.metrics.latency import CallLatency
from kv_pool.reports import LiveCurvePoint, LiveCurveReport, PoolStatistics


def stats(
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    socket: Socket = None,
    node: Node = None,
    json: Json = False,
) -> None:
    """Show the counts, shares and latencies of a running pool."""
    with ControlClient(socket, node=node) as client:

        def look() -> Text:
            statistics = client.get_statistics()
            if json:
                return Text(encode_json_line(statistics))
            return Text("\n".join(["KV Pool Statistics:", *(f"  {line}" for line in describe(statistics))]))

        if watch:
            watching.watch(look, Console(highlight=False))
        print(look())


def describe(statistics: PoolStatistics) -> list[str]:
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
