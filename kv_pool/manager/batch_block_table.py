"""`BatchBlockTable`: the block tables of all running requests as one padded array, written in place."""

from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from kv_pool.core.arguments import as_count, as_int, check_type
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import RequestId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.table_rows import TableRow, find_changed_rows, write_row

BlockIdArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]


NULL_BLOCK_ID: Final = 0
"""The id in entries without a block, and in padding."""


class BatchBlockTable:
    """The block ids of a batch, as attention kernels read them: one row per request, padded with the null id.

        >>> from kv_pool import BlockPool
        >>> from kv_pool.manager.block_groups.block_table import BlockTable
        >>> table = BlockTable()
        >>> table.blocks.extend(BlockPool(10, True, 4).get_new_blocks(3))
        >>> batch = BatchBlockTable(max_num_requests=2, max_num_blocks_per_request=5, block_size=4)
        >>> batch.add_request("first", table)
        0
        >>> batch.update()
        [0]
        >>> batch.get_rows()
        array([[1, 2, 3, 0, 0]], dtype=int32)

    The rows in use are 0 to `num_requests` - 1, without holes. A model with several groups of layers has one
    of these per group; add and remove the same requests in the same order to give them the same rows.

    Args:
        max_num_requests, max_num_blocks_per_request: the array's shape, at least 1 each.
        block_size: tokens per block, of the group that the tables belong to.
        dtype: int32 or int64.
        array: the array to write to; by default a new one. For example the NumPy view of a pinned tensor that
            is copied to a device. Contiguous, writable, of that shape and dtype; it is cleared.

    Attributes:
        block_ids: (max_num_requests, max_num_blocks_per_request), `dtype`; always the same array. Read-only
            for callers: a value that a caller writes stays until its entry changes.
    """

    def __init__(
        self,
        max_num_requests: int,
        max_num_blocks_per_request: int,
        block_size: int,
        *,
        dtype: npt.DTypeLike = np.int32,
        array: BlockIdArray | None = None,
    ) -> None:
        self.max_num_requests = as_count("max_num_requests", max_num_requests, 1)
        self.max_num_blocks_per_request = as_count(
            "max_num_blocks_per_request", max_num_blocks_per_request, 1
        )
        self.block_size = as_count("block_size", block_size, 1)
        if np.dtype(dtype) not in (np.int32, np.int64):
            raise InvalidArgumentError(f"block ids are int32 or int64, not {np.dtype(dtype)}")
        shape = (self.max_num_requests, self.max_num_blocks_per_request)
        if array is None:
            array = cast(BlockIdArray, np.empty(shape, dtype))
        elif array.shape != shape or array.dtype != dtype:
            raise InvalidArgumentError(
                f"array has dtype {array.dtype} and shape {array.shape}, not {np.dtype(dtype)} and {shape}"
            )
        elif not (array.flags.c_contiguous and array.flags.writeable):
            raise InvalidArgumentError("array is not contiguous or not writable; rows are written in place")
        self.block_ids: BlockIdArray = array
        self.block_ids.fill(NULL_BLOCK_ID)
        # A memoryview stores single integers faster than an array, and without NumPy's types.
        self._cells = memoryview(cast(Any, array.reshape(-1)))
        self._nulls = memoryview(cast(Any, np.zeros(shape[1], array.dtype)))
        self._rows: list[TableRow] = []
        self._row_numbers: dict[RequestId, int] = {}

    def __repr__(self) -> str:
        rows, columns = self.block_ids.shape
        return f"<BatchBlockTable of {self.num_requests} requests in {rows} rows of {columns} blocks>"

    @property
    def num_requests(self) -> int:
        return len(self._rows)

    def list_request_ids(self) -> list[RequestId]:
        """Return the request ids by row number."""
        return [row.request_id for row in self._rows]

    def get_row_number(self, request_id: RequestId) -> int:
        """Return the request's row number. It changes when another request is removed or rows are swapped.

        Raises:
            InvalidArgumentError: no such request.
        """
        check_type("request_id", request_id, str)
        row_number = self._row_numbers.get(request_id)
        if row_number is None:
            raise InvalidArgumentError(f"request {request_id!r} has no row; add_request() gives it one")
        return row_number

    def get_rows(self) -> BlockIdArray:
        """Return a view of the rows in use: (num_requests, max_num_blocks_per_request), as of `update`."""
        return self.block_ids[: len(self._rows)]

    def add_request(self, request_id: RequestId, table: BlockTable) -> int:
        """Assign the next row to a request and return its number. The next `update` writes the row.

        Args:
            table: the live table, as `KVCacheManager.get_table` returns it; `update` reads it until the
                request is removed. A request that lost its blocks and got new ones has a new table: remove
                it and add it again.
        Raises:
            InvalidArgumentError: the request already has a row, or all rows are in use. Nothing has changed.
        """
        check_type("request_id", request_id, str)
        check_type("table", table, BlockTable)
        row_number = len(self._rows)
        if request_id in self._row_numbers:
            raise InvalidArgumentError(
                f"request {request_id!r} has row {self._row_numbers[request_id]} already; "
                "call remove_request() first"
            )
        if row_number == self.max_num_requests:
            raise InvalidArgumentError(
                f"all {row_number} rows are taken; remove_request() makes room for {request_id!r}"
            )
        self._rows.append(TableRow(request_id, table))
        self._row_numbers[request_id] = row_number
        return row_number

    def remove_request(self, request_id: RequestId) -> int:
        """Remove a request; the last row moves into its place, so that the rows stay without holes.

        Returns:
            The number of the freed row. Unless it was the last row, it now belongs to the request that had
            the last row, which was row `num_requests` as counted after the call.
        Raises:
            InvalidArgumentError: no such request. Nothing has changed.
        Cost: a copy of the last row's blocks.
        """
        row_number = self.get_row_number(request_id)
        last = len(self._rows) - 1
        if row_number != last:
            self.swap_rows(row_number, last)
        self.block_ids[last, : self._rows[last].num_blocks] = NULL_BLOCK_ID
        del self._rows[last], self._row_numbers[request_id]
        return row_number

    def swap_rows(self, row_number: int, other_row_number: int) -> None:
        """Exchange the rows of two requests, such as to move decoding requests to the front.

        Raises:
            InvalidArgumentError: a number that is not a row in use. Nothing has changed.
        """
        if type(row_number) is not int or type(other_row_number) is not int:
            row_number = as_int("row_number", row_number)
            other_row_number = as_int("other_row_number", other_row_number)
        for number in (row_number, other_row_number):
            if not 0 <= number < len(self._rows):
                raise InvalidArgumentError(f"row {number} is not one of the {len(self._rows)} rows in use")
        if row_number == other_row_number:
            return
        rows = self._rows
        first, second = rows[row_number], rows[other_row_number]
        num_columns = max(first.num_blocks, second.num_blocks)
        written = self.block_ids[row_number, :num_columns].copy()
        self.block_ids[row_number, :num_columns] = self.block_ids[other_row_number, :num_columns]
        self.block_ids[other_row_number, :num_columns] = written
        rows[row_number], rows[other_row_number] = second, first
        self._row_numbers[second.request_id] = row_number
        self._row_numbers[first.request_id] = other_row_number

    def update(self) -> list[int]:
        """Update all rows from their tables. Call it once per step, after all slots are allocated.

        Returns:
            The numbers of the rows that were written, ascending; the other rows need no copy to a device.
        Raises:
            InvalidArgumentError: a table has more blocks than fit into a row. Nothing has changed.
        Cost: one check per request, plus the cost of `write_row` for each that changed.
        """
        changed = find_changed_rows(self._rows, self.max_num_blocks_per_request)
        for row_number in changed:
            first_cell = row_number * self.max_num_blocks_per_request
            write_row(self._rows[row_number], self._cells, first_cell, self._nulls)
        return changed

    def rewrite(self) -> None:
        """Write all rows again from their tables, regardless of their content: after blocks got other ids.

        Raises:
            InvalidArgumentError: as `update`. Nothing has changed.
        Cost: O(blocks of all requests).
        """
        find_changed_rows(self._rows, self.max_num_blocks_per_request)
        self.block_ids[: len(self._rows)] = NULL_BLOCK_ID
        for row in self._rows:
            row.num_blocks = row.num_null_blocks = 0
        self.update()
