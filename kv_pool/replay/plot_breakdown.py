"""Draws the breakdowns of a replay: hit rates by turn, minute, position, tenant and session."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.breakdown import BreakdownRow
from kv_pool.replay.figure import make_printable, open_pyplot, save_figure
from kv_pool.replay.report import ReplayReport

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
    plt = open_pyplot(path)
    count = len(report.breakdowns)
    figure, panels = plt.subplots(count, 1, figsize=(7.2, 3.2 * count), layout="constrained", squeeze=False)
    for (kind, rows), axes in zip(report.breakdowns.items(), panels[:, 0], strict=True):
        if kind in _LABELS:
            _draw_line(axes, kind, rows)
        else:
            _draw_bars(axes, kind, rows)
        mark = axes.axhline if kind in _LABELS else axes.axvline
        mark(report.token_hit_rate, color="black", linestyle=":", linewidth=1)
    trace = Path(report.provenance.trace).name if report.provenance else ""
    title = f"{trace}, {report.num_blocks:,} blocks of {report.block_size} tokens, {report.convention}"
    figure.suptitle(make_printable(title), fontsize=10, parse_math=False)
    save_figure(figure, path)


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
