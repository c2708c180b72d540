"""Draws reports: hit rates over capacity of sweeps, curves, plans and comparisons; breakdowns of replays."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kv_pool.core.kv_events import MEDIUM_CPU, MEDIUM_STORAGE
from kv_pool.drawing import check_can_draw, save_figure
from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.compare.comparison import CEILING, LRU, Comparison, TraceComparison
from kv_pool.lab.curves.curve_report import CurveReport
from kv_pool.lab.plan.plan_report import CapacityPlan
from kv_pool.lab.report import Provenance, ReplayReport
from kv_pool.lab.request_outcomes import BreakdownRow
from kv_pool.lab.settings import OPTIMUM

_MARKERS = "osD^vP*X"
_PANELS_PER_ROW = 3
_TICKS = (1.0, 2.0, 5.0)
_PLACES = {MEDIUM_CPU: "host memory", MEDIUM_STORAGE: "a disk tier"}
_NOT_COMPARED = ("num_blocks", "host_tier", "disk_tier", "trace", "by")


@contextmanager
def new_figure(
    path: str, rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.2, 4.4)
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a matplotlib figure and its axes, row by row. At the end, write it to an image file and close it.

    Args:
        size: width and height in inches.
    Raises:
        TraceError: matplotlib is not installed, or the file cannot be written.
    """
    check_can_draw(path)
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    try:
        yield figure, list(grid.flat)
        save_figure(figure, path, dpi=150)
    finally:
        pyplot.close(figure)


def choose_unit(block_bytes: float, block_size: int) -> tuple[float, str]:
    """Return the size of a block on an axis of capacities, and the unit: GiB if its bytes are known."""
    return (block_bytes / 2**30, "GiB") if block_bytes else (1.0, f"blocks of {block_size} tokens")


def format_capacity_axes(
    axes: Any, capacity: str, rate: str, title: str, ticks: Sequence[float] = (1.0,)
) -> None:
    """Give axes a logarithmic scale of capacities and a percent scale of hit rates from 0, with names.

    Args:
        ticks: capacities with numbers, as multiples of powers of 10.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda capacity, _: f"{capacity:,.12g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3, which="both")
    axes.set_xlabel(capacity)
    axes.set_ylabel(rate)
    axes.set_title(title, fontsize=10, parse_math=False)


def show_names_as_written(legend: Any) -> None:
    """Keep matplotlib from reading the names of a legend as mathematics; they may contain dollar signs."""
    for text in legend.get_texts():
        text.set_parse_math(False)


def name_trace(provenance: Provenance | None) -> str:
    """Return the file name of a report's trace for a title; empty if it is not known."""
    return "" if provenance is None else make_printable(Path(provenance.trace).name)


def make_printable(text: str) -> str:
    """Replace control characters, which XML pictures cannot contain; names come from files."""
    return "".join(one if one.isprintable() else "?" for one in text)


def draw_hit_rates(
    reports: Sequence[ReplayReport],
    path: str,
    overlays: Mapping[str, Sequence[ReplayReport]] | None = None,
) -> None:
    """Draw hit rates over capacity to an image file (.png, .svg, .pdf).

    A single sweep without tiers has two lines: the token hit rate and the block hit rate. Otherwise all lines
    are token hit rates over the capacity of pool and tiers together: for each sweep one line for the pool
    alone and further lines for the pool with tiers. A dotted line is the hit rate of an infinite cache.
    Capacity is in GiB if every report has the size of a block; otherwise in blocks, or in tokens if block
    sizes differ.

    Args:
        overlays: other sweeps for the same picture, by name. The legend shows the settings that differ.
    Raises:
        TraceError: matplotlib is not installed, or the file cannot be written.
        InvalidArgumentError: there are no reports.
    """
    overlays = overlays or {}
    if not reports or not all(overlays.values()):
        raise InvalidArgumentError("there are no reports to draw")
    sweeps = [reports, *overlays.values()]
    names = _name_sweeps(sweeps, ["this sweep", *(Path(name).name for name in overlays)])
    measure, unit = _choose_measure([report for sweep in sweeps for report in sweep])
    drawn: list[float] = []
    has_blocks = len(sweeps) == 1 and not any(report.tiers for report in reports)
    with new_figure(path) as (figure, (axes,)):
        for number, (name, sweep) in enumerate(zip(names, sweeps, strict=True)):
            lines = _split_lines(sweep)
            for style, (label, line) in enumerate(lines):
                capacities = [measure(report) for report in line]
                drawn += capacities
                if has_blocks:
                    rates = [report.block_hit_rate for report in line]
                    axes.plot(capacities, rates, "s--", color="C1", label="of full prompt blocks")
                    label = "of prompt tokens"
                elif len(sweeps) > 1:
                    label = f"{name}: {label}" if len(lines) > 1 else name
                axes.plot(
                    capacities,
                    [report.token_hit_rate for report in line],
                    f"{_MARKERS[style % len(_MARKERS)]}{'-' if style == 0 else '--'}",
                    color=f"C{number if len(sweeps) > 1 else style}",
                    label=label,
                )
            bound = sweep[0].infinite_cache
            if bound is not None:
                label = "_" if number else "of prompt tokens, infinite cache"  # one legend entry for all
                axes.axhline(bound.token_hit_rate, color=f"C{number}", linestyle=":", label=label)
        ticks = _TICKS if max(drawn) < 100 * min(drawn) else (1.0,)
        format_capacity_axes(axes, f"capacity in {unit}", "prefix-cache hit rate", _make_title(sweeps), ticks)
        if len(axes.get_legend_handles_labels()[1]) < 5:
            legend = axes.legend(loc="lower right")
        else:
            legend = figure.legend(loc="outside lower center", fontsize="small")
        show_names_as_written(legend)


def _choose_measure(reports: Sequence[ReplayReport]) -> tuple[Callable[[ReplayReport], float], str]:
    """Return a function that converts a report to a comparable capacity, and the unit's name."""
    block_size = reports[0].block_size
    if all(report.settings.get("block_bytes") for report in reports):
        return lambda report: count_capacity(report) * float(report.settings["block_bytes"]) / 2**30, "GiB"
    if all(report.block_size == block_size for report in reports):
        return count_capacity, choose_unit(0, block_size)[1]
    return lambda report: count_capacity(report) * report.block_size, "tokens"


def _split_lines(sweep: Sequence[ReplayReport]) -> list[tuple[str, list[ReplayReport]]]:
    """Return the label of each line and its reports, sorted by capacity.

    With tiers, either the last tier or the pool grows along a line, whichever needs fewer lines.
    """
    ordered = sorted(sweep, key=lambda report: (bool(report.tiers), report.num_blocks))
    by_pool: dict[str, list[ReplayReport]] = {}
    by_tiers: dict[str, list[ReplayReport]] = {}
    for report in ordered:
        fixed = [f"{tier.capacity:,} in {_PLACES.get(tier.medium, tier.medium)}" for tier in report.tiers]
        pool_label = tiers_label = "the pool alone"
        if report.tiers:
            last = _PLACES.get(report.tiers[-1].medium, report.tiers[-1].medium)
            pool_label = ", ".join([f"{report.num_blocks:,} in the pool", *fixed[:-1], f"others in {last}"])
            tiers_label = f"the pool, with {' and '.join(fixed)}"
        by_pool.setdefault(pool_label, []).append(report)
        by_tiers.setdefault(tiers_label, []).append(report)
    lines = by_pool if len(by_pool) <= len(by_tiers) else by_tiers
    for line in lines.values():
        line.sort(key=count_capacity)
    return list(lines.items())


def _describe(sweep: Sequence[ReplayReport]) -> dict[str, str]:
    """Return the settings that the replays of a sweep share, without capacities."""
    first = sweep[0]
    found = {name: str(value) for name, value in first.settings.items() if name not in _NOT_COMPARED}
    found |= {"block_size": str(first.block_size), "clock": first.clock, "convention": first.convention}
    found["trace"] = Path(first.provenance.trace).name if first.provenance else ""
    return found


def _name_sweeps(sweeps: Sequence[Sequence[ReplayReport]], names: Sequence[str]) -> list[str]:
    """Return a name for each sweep: the settings that differ, or the given name."""
    described = [_describe(sweep) for sweep in sweeps]
    keys = dict.fromkeys(key for settings in described for key in settings)
    varying = [key for key in keys if len({settings.get(key) for settings in described}) > 1]
    found = []
    for settings, name in zip(described, names, strict=True):
        values = [
            settings[key] if key in ("trace", "convention") else f"{key.replace('_', ' ')} {settings[key]}"
            for key in varying
            if key in settings
        ]
        found.append(make_printable(", ".join(values) or name))
    return found


def _make_title(sweeps: Sequence[Sequence[ReplayReport]]) -> str:
    """Return a title with the trace, number of requests, clock and convention that all sweeps share."""
    described = [_describe(sweep) for sweep in sweeps]
    common = {
        key: value for key, value in described[0].items() if all(value == it.get(key) for it in described)
    }
    num_requests = {sweep[0].requests for sweep in sweeps}
    parts = [f"{num_requests.pop():,} requests"] if len(num_requests) == 1 else []
    parts += [f"clock {common['clock']}"] if "clock" in common else []
    parts += [common["convention"]] if "convention" in common else []
    return "\n".join(make_printable(part) for part in (common.get("trace", ""), ", ".join(parts)) if part)


def count_capacity(report: ReplayReport) -> int:
    """Return the capacity of the pool and its tiers, in blocks."""
    return report.num_blocks + sum(tier.capacity for tier in report.tiers)


MAX_BARS = 25
"""Maximum number of sessions or tenants in a picture: those with the most prompt tokens."""

_MAX_LABEL_CHARS = 24
_LABELS = {
    "turn": "turn of the session",
    "minute": "minute of arrival",
    "position": "position in the prompt, tokens",
}


def draw_breakdowns(report: ReplayReport, path: str) -> None:
    """Draw one panel for each breakdown of a report to an image file (.png, .svg, .pdf).

    Turns, minutes and positions are on the horizontal axis, with the token hit rate as a line and the prompt
    tokens as bars. Tenants and sessions are horizontal bars, those with the most prompt tokens first. The
    dotted line is the hit rate of the whole replay.

    Raises:
        InvalidArgumentError: the report has no breakdowns.
        TraceError: matplotlib is not installed, or the file cannot be written. `check_can_draw` checks this
            before the replay.
    """
    if not report.breakdowns:
        raise InvalidArgumentError("the report has no breakdowns; replay with --by")
    count = len(report.breakdowns)
    with new_figure(path, count, size=(7.2, 3.2 * count)) as (figure, panels):
        for (kind, rows), axes in zip(report.breakdowns.items(), panels, strict=True):
            if kind in _LABELS:
                _draw_line(axes, kind, rows)
            else:
                _draw_bars(axes, kind, rows)
            mark = axes.axhline if kind in _LABELS else axes.axvline
            mark(report.token_hit_rate, color="black", linestyle=":", linewidth=1)
        pool = f"{report.num_blocks:,} blocks of {report.block_size} tokens"
        title = f"{name_trace(report.provenance)}, {pool}, {make_printable(report.convention)}"
        figure.suptitle(title, fontsize=10, parse_math=False)


def _draw_line(axes: Any, kind: str, rows: Sequence[BreakdownRow]) -> None:
    from matplotlib.ticker import EngFormatter, PercentFormatter

    shown = [row for row in rows if isinstance(row.key, int)]
    keys = [row.key for row in shown]
    places = range(len(shown)) if kind == "position" else keys
    tokens = axes.twinx()
    tokens.bar(places, [row.tokens_in for row in shown], color="lightgrey", width=0.8, zorder=0)
    tokens.set_ylabel("prompt tokens", color="grey")
    tokens.yaxis.set_major_formatter(EngFormatter())
    axes.set_zorder(tokens.get_zorder() + 1)
    axes.patch.set_visible(False)
    axes.plot(places, [row.token_hit_rate for row in shown], "o-", markersize=3, color="tab:blue")
    if kind == "position":
        axes.set_xticks(list(places), [f"{key:,}" for key in keys], rotation=45, fontsize="small")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(_LABELS[kind])
    axes.set_ylabel("token hit rate")
    axes.grid(alpha=0.3)


def _draw_bars(axes: Any, kind: str, rows: Sequence[BreakdownRow]) -> None:
    from matplotlib.ticker import PercentFormatter

    largest = sorted(rows, key=lambda row: -row.tokens_in)[:MAX_BARS]
    places = range(len(largest), 0, -1)
    axes.barh(places, [row.token_hit_rate for row in largest], color="tab:blue")
    labels = [_make_label(row) for row in largest]
    axes.set_yticks(list(places), labels, fontsize="x-small", parse_math=False)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    more = f", the {len(largest)} largest of {len(rows):,}" if len(largest) < len(rows) else ""
    axes.set_xlabel(f"token hit rate by {kind}{more}")
    axes.grid(alpha=0.3, axis="x")


def _make_label(row: BreakdownRow) -> str:
    text = "none" if row.key is None else make_printable(str(row.key))
    return text if len(text) <= _MAX_LABEL_CHARS else f"{text[:_MAX_LABEL_CHARS]}..."


def draw_curves(report: CurveReport, path: str) -> None:
    """Draw a report to an image file (.png, .svg, .pdf).

    Solid lines are token hit rates and dashed lines block hit rates, each of LRU and of the optimum; a
    dotted line is the token hit rate of an infinite cache, and a vertical line the knee. Bands are two
    standard errors of a sample wide to each side. Capacity is in GiB if the size of a block is known,
    otherwise in blocks.

    Raises:
        TraceError: matplotlib is not installed, or the file cannot be written.
    """
    per_block, unit = choose_unit(float(report.settings.get("block_bytes", 0)), report.block_size)
    capacities = [point.num_blocks * per_block for point in report.points]
    marker = _choose_marker(capacities)
    bounds = {"token": report.optimum_tokens, "block": report.optimum_blocks}
    title = (
        f"{name_trace(report.provenance)}\n{report.requests:,} requests one at a time, {report.convention}"
    )
    if report.sample is not None:
        title += f", {report.sample.rate:.2%} sampled by {report.sample.unit}"
    with new_figure(path) as (_, (axes,)):
        for kind, line in (("token", "-"), ("block", "--")):
            for policy, colour in (("LRU", "tab:blue"), ("optimum", "tab:orange")):
                counts = [point.lru if policy == "LRU" else point.optimum for point in report.points]
                rates = np.array([getattr(one, f"{kind}_hit_rate") for one in counts])
                name = f"{policy} (bound)" if policy == "optimum" and bounds[kind] == "bound" else policy
                label = f"{name}, of prompt {kind}s"
                axes.plot(capacities, rates, line + marker, color=colour, label=label)
                if report.sample is not None and kind == "token":
                    margins = 2 * np.array([one.token_rate_error for one in counts])
                    band = rates - margins, rates + margins
                    axes.fill_between(capacities, *band, color=colour, alpha=0.2, linewidth=0)
        ceiling = report.infinite_cache.token_hit_rate
        axes.axhline(ceiling, color="tab:green", linestyle=":", label="infinite cache, of prompt tokens")
        if report.knee is not None:
            axes.axvline(report.knee * per_block, color="0.5", linewidth=0.8, label="knee of LRU")
        format_capacity_axes(axes, f"capacity in {unit}", "prefix-cache hit rate", title)
        axes.legend(loc="lower right", fontsize="small")


def _choose_marker(points: Sequence[object]) -> str:
    return "." if len(points) < 20 else ""


def draw_plan(plan: CapacityPlan, path: str) -> None:
    """Draw a plan to an image file (.png, .svg, .pdf).

    The line is the predicted hit rate over the memory of the pool, dotted its ceiling. Vertical lines are the
    recommendation and the knee; the shaded area is below the demand of running requests during 99 % of the
    time. Crosses are predictions and rings replays, at the memory of the pool and its tiers together.

    Raises:
        TraceError: matplotlib is not installed, or the file cannot be written.
    """
    per_block, unit = choose_unit(plan.block_bytes, plan.block_size)
    sizes = [(point.num_blocks + 1) * per_block for point in plan.points]
    rates = [point.token_hit_rate for point in plan.points]
    checks = [check for check in plan.checks if check.block_size == plan.block_size]
    places = [check.num_held_blocks * per_block for check in checks]
    with new_figure(path) as (_, (axes,)):
        axes.plot(sizes, rates, "-" + _choose_marker(sizes), label="predicted, pool alone")
        axes.axhline(plan.ceiling, color="tab:green", linestyle=":", label="without evictions")
        recommended = (plan.recommended.num_blocks + 1) * per_block
        axes.axvline(recommended, color="tab:red", linewidth=1, label="recommended")
        if plan.knee is not None:
            knee = (plan.knee + 1) * per_block
            axes.axvline(knee, color="0.5", linewidth=0.8, linestyle="--", label="knee")
        axes.plot(places, [check.predicted for check in checks], "x", color="black", label="predicted")
        ring = {"color": "tab:red", "markerfacecolor": "none", "markersize": 8}
        replayed = [check.replayed for check in checks]
        axes.plot(places, replayed, "o", label="replayed, with its tiers", **ring)
        title = f"{name_trace(plan.provenance)}\n{plan.requests:,} requests, clock {plan.clock}, "
        title += f"blocks of {plan.block_size} tokens"
        memory = f"memory of the pool and its tiers in {unit}"
        format_capacity_axes(axes, memory, "prefix-cache hit rate, of prompt tokens", title)
        if plan.demand is not None and plan.demand.p99_blocks:
            left, right = axes.get_xlim()
            demand = plan.demand.p99_blocks * per_block
            axes.axvspan(min(left, demand), demand, color="0.9", zorder=0, label="demand of running requests")
            axes.set_xlim(min(left, demand), right)
        axes.legend(loc="best", fontsize="small")


def draw_comparison(comparison: Comparison, path: str) -> None:
    """Draw one panel per trace to an image file (.png, .svg, .pdf).

    Lines are token hit rates over capacity: LRU black, the optimum dashed, the infinite cache dotted, the
    other policies coloured. Capacity is in GiB if the size of a block is known, otherwise in blocks.

    Raises:
        TraceError: matplotlib is not installed, or the file cannot be written.
    """
    count = len(comparison.traces)
    columns = min(count, _PANELS_PER_ROW)
    rows = -(-count // columns)
    with new_figure(path, rows, columns, (1.0 + 5.2 * columns, 1.0 + 3.8 * rows)) as (figure, panels):
        for axes in panels[count:]:
            axes.set_visible(False)
        labels: dict[str, Any] = {}
        for found, axes in zip(comparison.traces, panels, strict=False):
            _draw_trace(found, axes)
            for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
                labels.setdefault(label, line)
        place: dict[str, Any] = {"loc": "outside lower center", "ncols": min(len(labels), 5)}
        legend = figure.legend(labels.values(), labels.keys(), fontsize="small", **place)
        show_names_as_written(legend)


def _draw_trace(found: TraceComparison, axes: Any) -> None:
    per_block, unit = choose_unit(found.block_bytes, found.block_size)
    by_policy: dict[str, list[tuple[float, float]]] = {}
    for row in found.rows:
        if row.token_hit_rate is not None and row.policy != CEILING:
            points = by_policy.setdefault(row.policy, [])
            points.append((row.num_blocks * per_block, row.token_hit_rate))
    number = 0
    for policy, points in by_policy.items():
        label = make_printable(policy)
        style: dict[str, Any] = {"color": f"C{number}", "marker": _MARKERS[number % len(_MARKERS)]}
        if policy == LRU:
            style, label = {"color": "black", "marker": "."}, "LRU"
        elif policy == OPTIMUM:
            style = {"color": "black", "marker": ".", "linestyle": "--"}
            label = "optimum" if found.optimum_tokens == "optimal" else "optimum (bound)"
        else:
            number += 1
        axes.plot(*zip(*points, strict=True), label=label, markersize=4, **style)
    ceiling = found.infinite_cache.token_hit_rate
    axes.axhline(ceiling, color="0.5", linestyle=":", label="infinite cache")
    title = f"{name_trace(found.provenance)}\n{found.requests:,} requests"
    format_capacity_axes(axes, f"capacity in {unit}", "token hit rate", title, _TICKS)
