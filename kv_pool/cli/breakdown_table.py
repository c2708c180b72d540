"""`make_breakdown_table`: hit rates by session, turn, tenant, minute or position, as a table."""

from collections.abc import Sequence

from rich.table import Table

from kv_pool.cli.foreign_text import make_cell
from kv_pool.replay.breakdown import BreakdownRow

MAX_ROWS = 20
"""Maximum number of rows. The report contains all."""

_BAR_WIDTH = 16


def make_breakdown_table(kind: str, rows: Sequence[BreakdownRow]) -> Table:
    """Return the first rows of a breakdown as a table; of sessions and tenants those with the most tokens."""
    if kind in ("session", "tenant"):
        rows = sorted(rows, key=lambda row: -row.tokens_in)
    table = Table(title=f"hit rate by {kind}{' in the prompt, in tokens' if kind == 'position' else ''}")
    table.add_column(kind, justify="left" if kind in ("session", "tenant") else "right", no_wrap=True)
    for column in ("requests", "prompt tokens", "token hits", "block hits"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows[:MAX_ROWS]:
        table.add_row(
            make_cell(_name(kind, row)),
            f"{row.requests:,}",
            f"{row.tokens_in:,}",
            f"{row.token_hit_rate:.2%}",
            f"{row.block_hit_rate:.2%}",
            "█" * round(_BAR_WIDTH * row.token_hit_rate),
        )
    if len(rows) > MAX_ROWS:
        table.caption = f"{len(rows) - MAX_ROWS:,} more rows in the file of --json"
    return table


def _name(kind: str, row: BreakdownRow) -> str:
    if row.key is None:
        return "none"
    if kind == "position" and isinstance(row.key, int):
        return f"{row.key:,} to {2 * row.key - 1 if row.key else 1023:,}"
    return f"{row.key:,}" if isinstance(row.key, int) else row.key
