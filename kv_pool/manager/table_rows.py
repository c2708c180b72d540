"""Track how much of each block table is written to a batch's array, and write the rest.

Plain typed Python without NumPy, so that it compiles: `find_changed_rows` visits every request in every step.
"""

from mypy_extensions import i64

from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import RequestId
from kv_pool.manager.block_groups.block_table import BlockTable


class TableRow:
    """A request's block table, and the part of it that is already written to its row.

        blocks   null null   7    2    9          row     0    0    7    2    9    0    0
                 num_null_blocks |                                                padding

    Attributes:
        request_id: the request that owns the row.
        table: the live table; the counts below describe it as of the last write.
        num_blocks: entries of the row that stand for blocks; the rest is padding, the null block's id.
        num_null_blocks: leading entries that hold the null block's id.
        num_edits: the table's `num_edits`.
    """

    def __init__(self, request_id: RequestId, table: BlockTable) -> None:
        self.request_id = request_id
        self.table = table
        self.num_blocks: i64 = 0
        self.num_null_blocks: i64 = 0
        self.num_edits: i64 = 0


def find_changed_rows(rows: list[TableRow], num_columns: int) -> list[int]:
    """Return the numbers of the rows whose table has changed since the last write, ascending.

    Changes nothing.

    Raises:
        InvalidArgumentError: a table has more than `num_columns` blocks.
    """
    changed: list[int] = []
    limit: i64 = num_columns
    for row_number, row in enumerate(rows):
        table = row.table
        num_blocks: i64 = len(table.blocks)
        if num_blocks != row.num_blocks or table.num_edits != row.num_edits:
            if num_blocks > limit:
                raise InvalidArgumentError(
                    f"request {row.request_id!r} has {num_blocks} blocks, but a row has room for {limit}; "
                    f"set max_num_blocks_per_request for the longest sequence"
                )
            changed.append(row_number)
    return changed


def write_row(row: TableRow, cells: memoryview, first_cell: int, nulls: memoryview) -> None:
    """Update one row. `cells[first_cell]` is its first entry; `nulls` is as long as a row.

    Cost: O(blocks added) if blocks were only appended, or also left a window, since the last write; else
    O(blocks that are not null).
    """
    table = row.table
    blocks = table.blocks
    offset: i64 = first_cell
    num_blocks: i64 = len(blocks)
    num_null: i64 = table.num_null_blocks
    num_edits: i64 = table.num_edits
    edits_since: i64 = num_edits - row.num_edits
    # One edit, and more leading entries are null: that was the edit, whether edits count entries or calls.
    is_head_only = edits_since == 1 and row.num_null_blocks < num_null
    start: i64 = num_null  # null entries below are written already, or are still padding
    if num_null < row.num_blocks and (edits_since == 0 or is_head_only):
        start = row.num_blocks
    if row.num_null_blocks < num_null:
        cells[offset + row.num_null_blocks : offset + num_null] = nulls[: num_null - row.num_null_blocks]
    at: i64 = start
    while at < num_blocks:
        cells[offset + at] = blocks[at].block_id
        at += 1
    if num_blocks < row.num_blocks:
        cells[offset + num_blocks : offset + row.num_blocks] = nulls[: row.num_blocks - num_blocks]
    row.num_blocks = num_blocks
    row.num_null_blocks = num_null
    row.num_edits = num_edits
