"""`kv-pool compare`: cache policies at several capacities, with LRU and the optimum beside them."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kv_pool.cli import options
from kv_pool.cli.console import Column, fit_table, make_table, print_error, print_table, show_progress
from kv_pool.cli.foreign_text import escape_text
from kv_pool.cli.options import choose_files, write_report
from kv_pool.cli.setting_options import complete, takes
from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.compare.compare import compare_policies
from kv_pool.replay.compare.comparison import (
    CEILING,
    LRU,
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
from kv_pool.replay.settings import OPTIMUM, ReplaySettings, list_known_policies
from kv_pool.replay.trace import BUNDLED_TRACES
from kv_pool.replay.worker_processes import open_executor

_FINISHED = ".runs"

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
            autocompletion=complete(lambda: BUNDLED_TRACES),
            help=f"Trace files (.jsonl, .gz, .xz, .zst), or of: {', '.join(BUNDLED_TRACES)}.",
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            "--policy",
            metavar="LIST",
            autocompletion=complete(list_known_policies),
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
        print_table(fit_table(make_rows_table(found), console), console)
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


def make_rows_table(found: TraceComparison) -> Table:
    """Return one row per policy and capacity, the most important columns first."""
    trace = Path(found.provenance.trace).name
    columns: list[Column] = [
        ("blocks", lambda row: f"{row.num_blocks:,}" if _is_first(row) else ""),
        ("policy", lambda row: _name_policy(row, found)),
        (
            "token hits",
            lambda row: row.error.split(":")[0] if row.error else _show_rate(row, "token_hit_rate"),
        ),
        ("block hits", lambda row: _show_rate(row, "block_hit_rate")),
        ("gap closed", lambda row: _show_rate(row, "gap_closed", "{:.1f}")),
        ("points over LRU", lambda row: _show_rate(row, "above_lru", "{:+.2f}", "")),
        ("hits", lambda row: _show_count(row.blocks_hit)),
        ("misses", lambda row: _show_count(row.blocks_missed)),
        ("evictions", lambda row: _show_count(row.evictions)),
        ("admitted", lambda row: _show_count(row.admitted)),
        ("seconds", lambda row: None if row.seconds is None else f"{row.seconds:.2f}"),
    ]
    rows: list[ComparisonRow | None] = []
    for row in found.rows:
        rows += [None, row] if _is_first(row) else [row]
    title = Text(f"{escape_text(trace)}, {found.requests:,} requests, blocks of {found.block_size} tokens")
    return make_table(columns, rows, left=("policy",), title=title)


def _is_first(row: ComparisonRow) -> bool:
    """Return True for a row that begins a group: that of LRU for each capacity, and of the infinite cache."""
    return row.policy in (LRU, CEILING)


def _name_policy(row: ComparisonRow, found: TraceComparison) -> str:
    if row.policy == OPTIMUM and found.optimum_tokens == "bound":
        return "bound" if found.optimum_blocks == "bound" else "optimum, bound of tokens"
    return {LRU: "LRU", CEILING: "infinite cache"}.get(row.policy, row.policy)


def _show_rate(row: ComparisonRow, name: str, form: str = "{:.2f}", unit: str = "%") -> str | None:
    """Return a rate of a row with its confidence interval, or None."""
    value, low, high = (getattr(row, each, None) for each in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return None
    text = form.format(100 * value) + unit
    if low is None or high is None:
        return text
    return f"{text} [{form.format(100 * low)}, {form.format(100 * high)}]"


def _show_count(count: int | None) -> str | None:
    return None if count is None else f"{count:,}"
