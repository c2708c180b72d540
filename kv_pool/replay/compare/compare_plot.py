"""Draws a comparison: hit rates of the policies over capacity, with LRU, the optimum and the ceiling."""

from typing import Any

from kv_pool.replay.compare.comparison import CEILING, LRU, Comparison, TraceComparison
from kv_pool.replay.figure import (
    format_capacity_axes,
    make_printable,
    name_trace,
    open_pyplot,
    save_figure,
    show_names_as_written,
)
from kv_pool.replay.settings import OPTIMUM

_PANELS_PER_ROW = 3
_MARKERS = "osD^vP*X"


def draw_comparison(comparison: Comparison, path: str) -> None:
    """Draw one panel per trace to an image file (.png, .svg, .pdf).

    Lines are token hit rates over capacity: LRU black, the optimum dashed, the infinite cache dotted, the
    other policies coloured. Capacity is in GiB if the size of a block is known, otherwise in blocks.

    Raises:
        TraceError: matplotlib is not installed, or the file cannot be written.
    """
    plt = open_pyplot(path)

    count = len(comparison.traces)
    columns = min(count, _PANELS_PER_ROW)
    lines = -(-count // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(1.0 + 5.2 * columns, 1.0 + 3.8 * lines), layout="constrained", squeeze=False
    )
    panels = list(grid.flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    for found, axes in zip(comparison.traces, panels, strict=False):
        _draw_trace(found, axes)
    labels: dict[str, Any] = {}
    for axes in panels[:count]:
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, line)
    legend = figure.legend(
        labels.values(),
        labels.keys(),
        loc="outside lower center",
        ncols=min(len(labels), 5),
        fontsize="small",
    )
    show_names_as_written(legend)
    save_figure(figure, path)


def _draw_trace(found: TraceComparison, axes: Any) -> None:
    from matplotlib.ticker import LogLocator

    per_block = found.block_bytes / 2**30 if found.block_bytes else 1.0
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
    unit = "GiB" if found.block_bytes else f"blocks of {found.block_size} tokens"
    title = f"{name_trace(found.provenance)}\n{found.requests:,} requests"
    format_capacity_axes(axes, f"capacity in {unit}", "token hit rate", title)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
