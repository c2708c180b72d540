"""Hit rates over capacity as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kv_pool.errors import InvalidArgumentError, TraceError
from kv_pool.replay.output_file import find_drawing_obstacle
from kv_pool.replay.report import ReplayReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_can_draw(path: str) -> None:
    """Raise TraceError if `draw_hit_rates` could not draw to `path`: better before a sweep than after."""
    obstacle = find_drawing_obstacle(path)
    if obstacle is not None:
        raise TraceError(f"{path}: can not write the picture: {obstacle}")


def draw_hit_rates(reports: Sequence[ReplayReport], path: str) -> None:
    """Draw token and block hit rate over capacity to an image file (.png, .svg, .pdf).

    Where some of the replays have colder tiers, it is the token hit rate, over all the capacity there is: a
    line for the pool alone, and one for each size of the pool with tiers below it.
    Raises:
        TraceError: matplotlib is not installed, or the file can not be written.
        InvalidArgumentError: no reports.
    """
    check_can_draw(path)
    if not reports:
        raise InvalidArgumentError("there are no reports to draw")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter, StrMethodFormatter

    ordered = sorted(reports, key=lambda report: report.num_blocks)
    first = ordered[0]
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    if any(report.tiers for report in ordered):
        _draw_tiers(axes, ordered)
    else:
        capacities = [report.num_blocks for report in ordered]
        rates = [report.token_hit_rate for report in ordered]
        axes.plot(capacities, rates, "o-", label="of prompt tokens")
        rates = [report.block_hit_rate for report in ordered]
        axes.plot(capacities, rates, "s--", label="of full prompt blocks")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(f"capacity in blocks of {first.block_size} tokens")
    axes.set_ylabel("prefix-cache hit rate")
    name = Path(first.provenance.trace).name if first.provenance else ""
    axes.set_title(
        f"{name}\n{first.requests:,} requests, clock {first.clock}, {first.convention}", fontsize=10
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="lower right")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: can not write the picture: {error}") from error
    finally:
        plt.close(figure)


def _draw_tiers(axes: "Axes", ordered: Sequence[ReplayReport]) -> None:
    alone = [report for report in ordered if not report.tiers]
    if len(alone) > 1:
        capacities = [report.num_blocks for report in alone]
        axes.plot(capacities, [report.token_hit_rate for report in alone], "ko-", label="the pool alone")
    for num_blocks in dict.fromkeys(report.num_blocks for report in ordered if report.tiers):
        line = [report for report in ordered if report.num_blocks == num_blocks]
        line.sort(key=count_capacity)
        axes.plot(
            [count_capacity(report) for report in line],
            [report.token_hit_rate for report in line],
            "s--",
            label=f"{num_blocks:,} in the pool, others in tiers",
        )


def count_capacity(report: ReplayReport) -> int:
    """Blocks that the pool and its tiers can hold."""
    return report.num_blocks + sum(tier.capacity for tier in report.tiers)
