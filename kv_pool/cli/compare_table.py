"""`make_compare_table`: the results of a comparison on one trace as a table, and sentences about them."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kv_pool.cli.console import fit_table, new_table
from kv_pool.cli.foreign_text import escape_text, make_cell
from kv_pool.replay.compare.comparison import CEILING, ComparisonRow, TraceComparison
from kv_pool.replay.settings import OPTIMUM

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


def make_compare_table(found: TraceComparison, console: Console) -> Table:
    """Return one row per policy and capacity; on a narrow terminal without the last columns."""
    return fit_table(lambda num_columns: _lay_out(found, num_columns), len(_COLUMNS), console)


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


def describe_bound(of_blocks: str | None, of_tokens: str | None) -> list[str]:
    """Return a sentence about the optimum if only a bound of its blocks or its tokens is known."""
    if of_blocks == "bound":
        return [
            "bound: requests compute cached blocks again, so policies that keep prefixes whole may hit less"
        ]
    if of_tokens == "bound":
        return ["bound: hits of partial blocks have different tokens, so the token hits may be fewer"]
    return []


def list_errors(found: TraceComparison) -> list[str]:
    """Return one line for each run that an error has ended."""
    trace = Path(found.provenance.trace).name
    return [
        f"{row.policy} at {row.num_blocks:,} blocks, {trace}: {row.error}"
        for row in found.rows
        if row.error is not None
    ]


def _lay_out(found: TraceComparison, num_columns: int) -> Table:
    trace = escape_text(Path(found.provenance.trace).name)
    title = Text(f"{trace}, {found.requests:,} requests, blocks of {found.block_size} tokens")
    numbers = [name for name in _COLUMNS if name != "policy"]
    table = new_table(_COLUMNS[:num_columns], right=numbers, title=title)
    capacity = None
    for row in found.rows:
        if capacity not in (None, row.num_blocks):
            table.add_section()
        cells = _make_cells(row, found)
        if row.num_blocks == capacity:
            cells[0] = Text()
        capacity = row.num_blocks
        table.add_row(*cells[:num_columns])
    return table


def _make_cells(row: ComparisonRow, found: TraceComparison) -> list[Text]:
    if row.error is not None:
        name = row.error.split(":")[0]
        return [Text(f"{row.num_blocks:,}"), make_cell(row.policy), Text(name), *[Text()] * 8]
    policy = {"lru": "LRU", CEILING: "infinite cache"}.get(row.policy, row.policy)
    if row.policy == OPTIMUM and found.optimum_tokens == "bound":
        policy = "bound" if found.optimum_blocks == "bound" else "optimum, bound of tokens"
    counts = (row.blocks_hit, row.blocks_missed, row.evictions, row.admitted)
    cells = [
        f"{row.num_blocks:,}",
        policy,
        _show(row.token_hit_rate, None, None, "{:.2f}", "%"),
        _show(row.block_hit_rate, None, None, "{:.2f}", "%"),
        _show(row.gap_closed, row.gap_closed_low, row.gap_closed_high, "{:.1f}", "%"),
        _show(row.above_lru, row.above_lru_low, row.above_lru_high, "{:+.2f}", ""),
        *("" if count is None else f"{count:,}" for count in counts),
        "" if row.seconds is None else f"{row.seconds:.2f}",
    ]
    return [make_cell(cell) for cell in cells]


def _show(value: float | None, low: float | None, high: float | None, form: str, unit: str) -> str:
    if value is None:
        return ""
    text = form.format(100 * value) + unit
    if low is None or high is None:
        return text
    return f"{text} [{form.format(100 * low)}, {form.format(100 * high)}]"
