"""`kv-pool compare`: cache policies at several capacities, with LRU and the optimum beside them."""

import os
import sys
from dataclasses import replace
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kv_pool.cli import options
from kv_pool.cli.console import fit_table, new_table, print_error, print_table, show_progress
from kv_pool.cli.foreign_text import escape_text
from kv_pool.cli.options import choose_files, write_report
from kv_pool.cli.setting_options import takes
from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.compare.compare import compare_policies
from kv_pool.replay.compare.comparison import (
    CEILING,
    ComparedTrace,
    CompareSettings,
    Comparison,
    ComparisonRow,
    TraceComparison,
    list_changed_inputs,
    list_differences,
    read_comparison,
    write_csv,
)
from kv_pool.replay.curves.curve_report import describe_bound
from kv_pool.replay.pictures.hit_rates import draw_comparison
from kv_pool.replay.settings import OPTIMUM, ReplaySettings
from kv_pool.replay.trace import BUNDLED_TRACES
from kv_pool.replay.worker_processes import open_executor

_FINISHED = ".runs"

_COLUMNS = (
    "blocks",
    "policy",
    "token hits",
    "block hits",
    "gap closed",
    "points over LRU",
    "hits",
    "misses",
    "evictions",
    "admitted",
    "seconds",
)

_ORDER = """
traces policies blocks memory model num_layers num_kv_heads head_size dtype_bytes block_size convention clock
prefill_rate decode_rate max_running speedup groups states chunk_tokens watermark host_tier disk_tier
copy_rate disk_rate tier_write limit trace_block_size timestamp_unit skip_broken seed resamples json csv png
jobs on again
"""


@takes(ReplaySettings, _ORDER, trace="", num_blocks=1)
def compare(
    settings: ReplaySettings,
    capacity: options.CapacityOptions,
    traces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TRACE...",
            help=f"Trace files (.jsonl, .gz, .xz, .zst), or of: {', '.join(BUNDLED_TRACES)}.",
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Cache policies, separated by commas: names of kv_pool/policies such as s3fifo, entry "
            "points, module:Class, file.py:Class, flat:NAME. LRU and the optimum are always compared.",
        ),
    ] = None,
    resamples: Annotated[
        int,
        typer.Option(
            min=0,
            help="Samples of the sessions (or of the prompts by their first block after a common system "
            "prompt) for the confidence intervals; 0 for none. --seed sets the samples, too.",
        ),
    ] = 1000,
    json: Annotated[
        str | None,
        typer.Option(
            "--json",
            help="Write the results, with all settings and digests, to this file. Finished runs are kept "
            "beside it until all are finished: after an interruption, the same command goes on.",
        ),
    ] = None,
    csv: Annotated[
        str | None, typer.Option(help="Write one row per policy, capacity and trace to this file.")
    ] = None,
    png: Annotated[str | None, options.declare_picture("picture", "compare")] = None,
    jobs: options.Jobs = 0,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on a cluster: dask://HOST:PORT or ray://HOST:PORT. Its workers need kv_pool in this "
            "version, and each trace under the same path; policies from files are sent.",
        ),
    ] = None,
    again: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Repeat the comparison of a --json file, and say what differs; the files are found by the "
            "same paths. Settings come from the file.",
        ),
    ] = None,
) -> None:
    """Compare cache policies, with LRU, the optimum and an infinite cache beside them."""
    earlier = None
    if again is not None:
        if traces or policies or capacity.blocks or capacity.memory:
            raise InvalidArgumentError("--again takes traces, policies and capacities from its file")
        earlier = read_comparison(again)
        wanted = earlier.settings
    else:
        if not traces or not policies:
            raise InvalidArgumentError("pass one or more traces, and --policies, such as --policies s3fifo")
        compared = []
        for trace in traces:
            of_trace, capacities = capacity.find(replace(settings, trace=trace))
            compared.append(ComparedTrace(of_trace, tuple(capacities)))
        seed = int(settings.seed) if settings.seed.isascii() and settings.seed.isdigit() else 0
        names = tuple(name.strip() for name in policies.split(",") if name.strip())
        wanted = CompareSettings(tuple(compared), names, resamples, seed)
    if on is not None:
        wanted = _find_files(wanted)
    picture = choose_files("compare.png", png, json, csv)
    finished = None if json is None else f"{json}{_FINISHED}"
    num_processes = jobs or os.cpu_count() or 1
    with show_progress("comparing") as notify, open_executor(on, num_processes) as executor:
        comparison = compare_policies(wanted, executor, finished, notify)
    write_report(comparison, json)
    if csv is not None:
        write_csv(comparison, csv)
    draw_comparison(comparison, picture)
    has_failed = _show(comparison, picture)
    if earlier is not None:
        has_failed |= _show_differences(earlier, comparison)
    if has_failed:
        sys.stdout.flush()
        raise typer.Exit(2)


def _find_files(wanted: CompareSettings) -> CompareSettings:
    """Return the settings with absolute paths of traces: workers of a cluster have other current folders."""
    traces = []
    for compared in wanted.traces:
        trace = compared.settings.trace
        path = os.path.abspath(trace) if os.path.isfile(trace) else trace  # a bundled trace has a name
        traces.append(ComparedTrace(replace(compared.settings, trace=path), compared.capacities))
    return msgspec.structs.replace(wanted, traces=tuple(traces))


def _show(comparison: Comparison, picture: str) -> bool:
    """Print the results. Return True if a run has failed, or results contradict each other."""
    console = Console()
    errors = []
    for found in comparison.traces:
        print_table(fit_table(make_table(found), console), console)
        for line in describe(found, comparison.settings.resamples):
            print(line)
        errors += list_errors(found)
    states = {found.optimum_blocks for found in comparison.traces} - {None}
    if states and not comparison.contradictions:
        print(f"no policy is above the {'optimum' if 'optimal' in states else 'bound'}")
    print(f"picture: {escape_text(picture)}")
    for line in [*errors, *comparison.contradictions]:
        print_error(line)
    return bool(errors or comparison.contradictions)


def _show_differences(earlier: Comparison, comparison: Comparison) -> bool:
    """Print what differs from an earlier comparison. Return True if results differ."""
    for line in list_changed_inputs(earlier, comparison):
        print(escape_text(line))
    differences = list_differences(earlier, comparison)
    for line in differences:
        print_error(line)
    if not differences:
        print("the results are the same as before")
    return bool(differences)


def describe(found: TraceComparison, num_samples: int) -> list[str]:
    """Return sentences about the intervals, the bound, a missing optimum, and errors of runs."""
    lines = []
    if num_samples and found.units > 1:
        lines.append(
            f"in brackets: 95 % confidence intervals, from {num_samples:,} samples of the {found.units:,} "
            f"{found.unit}s"
        )
    if found.why_no_optimum is not None:
        lines.append(f"no optimum: {escape_text(found.why_no_optimum)}")
    return lines + describe_bound(found.optimum_blocks, found.optimum_tokens)


def list_errors(found: TraceComparison) -> list[str]:
    """Return one line for each run that an error has ended."""
    trace = Path(found.provenance.trace).name
    return [
        f"{row.policy} at {row.num_blocks:,} blocks, {trace}: {row.error}"
        for row in found.rows
        if row.error is not None
    ]


def make_table(found: TraceComparison) -> Table:
    """Return one row per policy and capacity, the most important columns first."""
    trace = escape_text(Path(found.provenance.trace).name)
    title = Text(f"{trace}, {found.requests:,} requests, blocks of {found.block_size} tokens")
    numbers = [name for name in _COLUMNS if name != "policy"]
    rows: list[list[str] | None] = []
    for num_blocks, of_capacity in groupby(found.rows, key=lambda row: row.num_blocks):
        capacities = chain([f"{num_blocks:,}"], repeat(""))
        rows += [[next(capacities), *_make_cells(row, found)] for row in of_capacity]
        rows.append(None)
    return new_table(_COLUMNS, rows, right=numbers, title=title)


def _make_cells(row: ComparisonRow, found: TraceComparison) -> list[str]:
    """Return the cells of a row after the capacity."""
    if row.error is not None:
        return [row.policy, row.error.split(":")[0], *[""] * 8]
    policy = {"lru": "LRU", CEILING: "infinite cache"}.get(row.policy, row.policy)
    if row.policy == OPTIMUM and found.optimum_tokens == "bound":
        policy = "bound" if found.optimum_blocks == "bound" else "optimum, bound of tokens"
    counts = (row.blocks_hit, row.blocks_missed, row.evictions, row.admitted)
    return [
        policy,
        _format_rate(row.token_hit_rate, None, None, "{:.2f}", "%"),
        _format_rate(row.block_hit_rate, None, None, "{:.2f}", "%"),
        _format_rate(row.gap_closed, row.gap_closed_low, row.gap_closed_high, "{:.1f}", "%"),
        _format_rate(row.above_lru, row.above_lru_low, row.above_lru_high, "{:+.2f}", ""),
        *("" if count is None else f"{count:,}" for count in counts),
        "" if row.seconds is None else f"{row.seconds:.2f}",
    ]


def _format_rate(value: float | None, low: float | None, high: float | None, form: str, unit: str) -> str:
    if value is None:
        return ""
    text = form.format(100 * value) + unit
    if low is None or high is None:
        return text
    return f"{text} [{form.format(100 * low)}, {form.format(100 * high)}]"
