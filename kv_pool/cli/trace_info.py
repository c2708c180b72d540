"""`kv-pool trace info`: describe a trace."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TaskProgressColumn
from rich.table import Table
from rich.text import Text

from kv_pool.cli.console import new_table, print_json, print_table
from kv_pool.cli.control_options import Json
from kv_pool.cli.foreign_text import escape_text
from kv_pool.cli.progress import make_progress_bar
from kv_pool.cli.setting_options import takes
from kv_pool.replay.settings import ReplaySettings
from kv_pool.replay.trace_info import Percentiles, TraceInfo, describe_trace

_COLUMNS = ("mean", "p10", "p50", "p90", "p99", "max")


@takes(ReplaySettings, "trace block_size json trace_block_size timestamp_unit skip_broken", num_blocks=1)
def info(
    settings: ReplaySettings,
    block_size: Annotated[int, typer.Option(help="Tokens per block, for traces of token ids.", min=1)] = 16,
    json: Json = False,
) -> None:
    """Describe a trace: requests, blocks, sessions, reuse, and the hit rate of a cache that never evicts."""
    trace = settings.open_trace()
    with make_progress_bar("reading", TaskProgressColumn()) as bar:
        task = bar.add_task("read", total=1.0, live="")
        found = describe_trace(trace, block_size, lambda: bar.update(task, completed=trace.position))
    if json:
        print_json(found)
        return
    for table in (_make_counts(found), _make_percentiles(found), _make_ceilings(found)):
        print_table(table)


def _make_counts(info: TraceInfo) -> Table:
    table = Table(title=Text(escape_text(Path(info.trace).name)), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    table.add_row("requests", f"{info.requests:,}", "")
    if info.broken_lines:
        table.add_row("broken lines", f"{info.broken_lines:,}", "skipped")
    if info.late_requests:
        table.add_row("late", f"{info.late_requests:,}", "timestamps that go backwards")
    if info.inconsistent_requests:
        table.add_row(
            "inconsistent", f"{info.inconsistent_requests:,}", "requests whose ids contradict earlier ones"
        )
    table.add_row("prompt tokens", f"{info.tokens_in:,}", f"{info.tokens_out:,} generated tokens")
    table.add_row("time span", f"{info.span_s:,.0f} s", "from the first to the last arrival")
    table.add_row(
        "arrivals", f"{info.requests_per_s:,.3g}/s", f"{info.busiest_minute:,} in the busiest minute"
    )
    if info.sessions:
        table.add_row("sessions", f"{info.sessions:,}", f"{info.turns.mean:,.1f} requests each")
    if info.tenants:
        table.add_row("tenants", f"{info.tenants:,}", "")
    table.add_section()
    table.add_row("block size", f"{info.block_size:,}", "tokens")
    table.add_row("block look-ups", f"{info.blocks_looked_up:,}", "blocks of all prompts")
    table.add_row("distinct blocks", f"{info.distinct_blocks:,}", "")
    table.add_row(
        "used once",
        f"{info.share_used_once:.1%}",
        f"{info.blocks_used_once:,} blocks; the others {info.uses_per_reused_block:.1f} times each",
    )
    return table


def _make_percentiles(info: TraceInfo) -> Table:
    table = Table()
    table.add_column("", style="bold", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    rows: list[tuple[str, Percentiles]] = [
        ("blocks per request", info.blocks_per_request),
        ("prompt tokens", info.input_length),
        ("generated tokens", info.output_length),
    ]
    if info.sessions:
        rows += [("requests per session", info.turns), ("between turns, s", info.turn_gaps_s)]
    rows.append(("reused after, s", info.reuse_distance_s))
    for name, values in rows:
        table.add_row(name, *(_show(getattr(values, column)) for column in _COLUMNS))
    return table


def _show(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:,.1f}"


def _make_ceilings(info: TraceInfo) -> Table:
    numbers = ("token hits", "block hits", "tokens")
    table = new_table(("convention", *numbers), right=numbers, title="a cache that never evicts")
    for convention, found in info.ceilings.items():
        table.add_row(
            convention, f"{found.token_hit_rate:.2%}", f"{found.block_hit_rate:.2%}", f"{found.tokens_hit:,}"
        )
    return table
