"""`kv-pool compare`: cache policies at several capacities, with LRU and the optimum beside them."""

import os
from dataclasses import replace
from functools import partial

import msgspec

from kv_pool.cli import options
from kv_pool.cli.console import show_progress
from kv_pool.cli.setting_options import takes
from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.compare.compare import compare_policies
from kv_pool.lab.compare.comparison import (
    ComparedTrace,
    CompareSettings,
    Comparison,
    list_changed_inputs,
    list_differences,
    read_comparison,
    report_comparison,
)
from kv_pool.lab.pictures.hit_rates import draw_comparison
from kv_pool.lab.settings import ReplaySettings, list_known_policies
from kv_pool.lab.tables import Report
from kv_pool.lab.worker_processes import open_executor
from kv_pool.option import setting
from kv_pool.shared_options import BUNDLED_TRACES

_FINISHED = ".runs"
_NAMES = ", ".join(BUNDLED_TRACES)

_ORDER = """
traces policies blocks memory model num_layers num_kv_heads head_size dtype_bytes block_size convention clock
prefill_rate decode_rate max_running speedup groups states chunk_tokens watermark keep_sessions keep_prefix
host_tier disk_tier copy_rate disk_rate tier_write limit trace_block_size timestamp_unit skip_broken seed
resamples json csv png jobs on again
"""


@takes(_ORDER, trace="", num_blocks=1)
def compare(
    settings: ReplaySettings,
    capacity: options.CapacityOptions,
    outputs: options.Outputs,
    traces: list[str] | None = setting(
        f"Trace files (.jsonl, .gz, .xz, .zst), or of: {_NAMES}.",
        default=None,
        metavar="TRACE...",
        known=lambda: BUNDLED_TRACES,
        is_argument=True,
    ),
    policies: str | None = setting(
        "Cache policies, separated by commas: names of kv_pool/policies such as s3fifo, entry points, "
        "module:Class, file.py:Class, flat:NAME. LRU and the optimum are always compared.",
        default=None,
        metavar="LIST",
        flags=("--policies", "--policy"),
        known=list_known_policies,
    ),
    resamples: int = setting(
        "Samples of the sessions (or of the prompts by their first block after a common system prompt) for "
        "the confidence intervals; 0 for none. --seed sets the samples, too.",
        default=1000,
        min=0,
    ),
    jobs: int = setting(options.JOBS, default=0),
    on: str | None = setting(
        "Run on a cluster: dask://HOST:PORT or ray://HOST:PORT. Its workers need kv_pool in this version, "
        "and each trace under the same path; policies from files are sent.",
        default=None,
        metavar="ADDRESS",
    ),
    again: str | None = setting(
        "Repeat the comparison of a --json file, and say what differs; the files are found by the same "
        "paths. Settings come from the file.",
        default=None,
        metavar="FILE",
    ),
) -> None:
    """Compare cache policies, with LRU, the optimum and an infinite cache beside them.

    With --json, finished runs are kept: after an interruption, the same command goes on.
    """
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
    outputs.check()
    finished = None if outputs.json is None else f"{outputs.json}{_FINISHED}"
    num_processes = jobs or os.cpu_count() or 1
    with show_progress("comparing") as notify, open_executor(on, num_processes) as executor:
        comparison = compare_policies(wanted, executor, finished, notify)
    report = report_comparison(comparison)
    if earlier is not None:
        report = _add_differences(report, earlier, comparison)
    outputs.write(report, partial(draw_comparison, comparison))


def _find_files(wanted: CompareSettings) -> CompareSettings:
    """Return the settings with absolute paths of traces: workers of a cluster have other current folders."""
    traces = []
    for compared in wanted.traces:
        trace = compared.settings.trace
        path = os.path.abspath(trace) if os.path.isfile(trace) else trace  # a bundled trace has a name
        traces.append(ComparedTrace(replace(compared.settings, trace=path), compared.capacities))
    return msgspec.structs.replace(wanted, traces=tuple(traces))


def _add_differences(report: Report, earlier: Comparison, comparison: Comparison) -> Report:
    """Return the report with what differs from an earlier comparison; different results are errors."""
    lines = list(list_changed_inputs(earlier, comparison))
    differences = list(list_differences(earlier, comparison))
    if not differences:
        lines.append("the results are the same as before")
    return replace(report, shown=[*report.shown, *lines], errors=[*report.errors, *differences])
