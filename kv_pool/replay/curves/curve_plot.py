"""Draws the hit rates of LRU and of the optimum over capacity."""

from kv_pool.replay.curves.curve_report import CurveReport
from kv_pool.replay.figure import format_capacity_axes, name_trace, open_pyplot, save_figure


def draw_curves(report: CurveReport, path: str) -> None:
    """Draw a report to an image file (.png, .svg, .pdf).

    Solid lines are token hit rates and dashed lines block hit rates, each of LRU and of the optimum; a
    dotted line is the token hit rate of an infinite cache, and a vertical line the knee. Bands are two
    standard errors of a sample wide to each side. Capacity is in GiB if the size of a block is known,
    otherwise in blocks.

    Raises:
        TraceError: matplotlib is not installed, or the file cannot be written.
    """
    plt = open_pyplot(path)

    block_bytes = report.settings.get("block_bytes")
    unit, per_block = f"blocks of {report.block_size} tokens", 1.0
    if block_bytes:
        unit, per_block = "GiB", float(block_bytes) / 2**30
    capacities = [point.num_blocks * per_block for point in report.points]
    bounds = {"tokens": report.optimum_tokens, "blocks": report.optimum_blocks}
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    for kind, line in (("tokens", "-"), ("blocks", "--")):
        for policy, colour in (("LRU", "tab:blue"), ("optimum", "tab:orange")):
            counts = [point.lru if policy == "LRU" else point.optimum for point in report.points]
            rates = [one.token_hit_rate if kind == "tokens" else one.block_hit_rate for one in counts]
            name = f"{policy} (bound)" if policy == "optimum" and bounds[kind] == "bound" else policy
            marker = "." if len(capacities) < 20 else ""
            axes.plot(capacities, rates, f"{line}{marker}", color=colour, label=f"{name}, of prompt {kind}")
            if report.sample is not None and kind == "tokens":
                margins = [2 * one.token_rate_error for one in counts]
                axes.fill_between(
                    capacities,
                    [rate - margin for rate, margin in zip(rates, margins, strict=True)],
                    [rate + margin for rate, margin in zip(rates, margins, strict=True)],
                    color=colour,
                    alpha=0.2,
                    linewidth=0,
                )
    ceiling = report.infinite_cache.token_hit_rate
    axes.axhline(ceiling, color="tab:green", linestyle=":", label="infinite cache, of prompt tokens")
    if report.knee is not None:
        axes.axvline(report.knee * per_block, color="0.5", linewidth=0.8, label="knee of LRU")
    sampled = "" if report.sample is None else f", {report.sample.rate:.2%} sampled by {report.sample.unit}"
    title = f"{report.requests:,} requests one at a time, {report.convention}{sampled}"
    title = f"{name_trace(report.provenance)}\n{title}"
    format_capacity_axes(axes, f"capacity in {unit}", "prefix-cache hit rate", title)
    axes.legend(loc="lower right", fontsize="small")
    save_figure(figure, path)
