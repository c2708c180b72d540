"""Draws a plan: the predicted curve, the recommendation, the demand, and the replays."""

from kv_pool.replay.figure import format_capacity_axes, name_trace, open_pyplot, save_figure
from kv_pool.replay.plan.plan_report import CapacityPlan

_GIB = 2**30


def draw_plan(plan: CapacityPlan, path: str) -> None:
    """Draw a plan to an image file (.png, .svg, .pdf).

    The line is the predicted hit rate over the memory of the pool, dotted its ceiling. Vertical lines are the
    recommendation and the knee; the shaded area is below the demand of running requests during 99 % of the
    time. Crosses are predictions and rings replays, at the memory of the pool and its tiers together.

    Raises:
        TraceError: matplotlib is not installed, or the file cannot be written.
    """
    plt = open_pyplot(path)

    per_block = plan.block_bytes / _GIB
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    sizes = [point.memory_bytes / _GIB for point in plan.points]
    marker = "." if len(sizes) < 20 else ""
    axes.plot(
        sizes, [point.token_hit_rate for point in plan.points], f"-{marker}", label="predicted, pool alone"
    )
    axes.axhline(plan.ceiling, color="tab:green", linestyle=":", label="without evictions")
    axes.axvline(plan.recommended.memory_bytes / _GIB, color="tab:red", linewidth=1, label="recommended")
    if plan.knee is not None:
        axes.axvline((plan.knee + 1) * per_block, color="0.5", linewidth=0.8, linestyle="--", label="knee")
    checks = [check for check in plan.checks if check.block_size == plan.block_size]
    places = [(check.num_blocks + 1 + check.host_blocks + check.disk_blocks) * per_block for check in checks]
    axes.plot(places, [check.predicted for check in checks], "x", color="black", label="predicted")
    axes.plot(
        places,
        [check.replayed for check in checks],
        "o",
        color="tab:red",
        markerfacecolor="none",
        markersize=8,
        label="replayed, with its tiers",
    )
    title = f"{plan.requests:,} requests, clock {plan.clock}, blocks of {plan.block_size} tokens"
    format_capacity_axes(
        axes,
        "memory of the pool and its tiers in GiB",
        "prefix-cache hit rate, of prompt tokens",
        f"{name_trace(plan.provenance)}\n{title}",
    )
    if plan.demand is not None and plan.demand.p99_blocks:
        left, right = axes.get_xlim()
        demand = plan.demand.p99_blocks * per_block
        axes.axvspan(min(left, demand), demand, color="0.9", zorder=0, label="demand of running requests")
        axes.set_xlim(min(left, demand), right)
    axes.legend(loc="best", fontsize="small")
    save_figure(figure, path)
