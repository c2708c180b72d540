"""What of each block table a batch's array holds, and how the rest gets there.

Plain typed Python without NumPy, so that it compiles: `find_changed_rows` visits every request at every step.
"""

from mypy_extensions import i64

from kv_pool.errors import InvalidArgumentError
from kv_pool.manager.block_groups.block_table import BlockTable


class TableRow:
    """A request's block table, and what of it was written into its row so far.

        blocks   null null   7    2    9          row     0    0    7    2    9    0    0
                 num_null_blocks |                                                padding

    Attributes:
        request_id: whose row it is.
        table: as it is now; the counts are what it was when the row was written.
        num_blocks: entries of the row that stand for blocks; those behind are padding, the null block's id.
        num_null_blocks: entries from the head that hold the null block's id.
        num_edits: the table's.
    """

    __slots__ = ("num_blocks", "num_edits", "num_null_blocks", "request_id", "table")

    def __init__(self, request_id: str, table: BlockTable) -> None:
        self.request_id = request_id
        self.table = table
        self.num_blocks: i64 = 0
        self.num_null_blocks: i64 = 0
        self.num_edits: i64 = 0


def find_changed_rows(rows: list[TableRow], num_columns: int) -> list[int]:
    """The numbers of the rows whose table is not what was written, ascending. Changes nothing.

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
                    f"request {row.request_id!r} has {num_blocks} blocks, a row has room for {limit}; "
                    f"max_num_blocks_per_request is to be that of the longest sequence"
                )
            changed.append(row_number)
    return changed


def write_row(row: TableRow, cells: memoryview, first_cell: int, nulls: memoryview) -> None:
    """Bring one row up to date; `cells[first_cell]` is its first entry, `nulls` as long as a row.

    Cost: O(blocks added), where blocks were only appended, or also fell out of a window since. After another
    edit O(blocks that are not null).
    """
    table = row.table
    blocks = table.blocks
    offset: i64 = first_cell
    num_blocks: i64 = len(blocks)
    num_null: i64 = table.num_null_blocks
    num_edits: i64 = table.num_edits
    edits_since: i64 = num_edits - row.num_edits
    # One edit, and more of the head is null: that was the edit, whether the table counts entries or calls.
    is_head_only = edits_since == 1 and row.num_null_blocks < num_null
    start: i64 = num_null  # what is null below is written as such, or padding already
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
