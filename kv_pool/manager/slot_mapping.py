"""`SlotMapping`: the slots of a step's tokens, for the whole batch; `list_slots`: those of one table."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kv_pool.core.arguments import as_count, as_int
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.ids import BlockId
from kv_pool.manager.batch_block_table import NULL_BLOCK_ID, BatchBlockTable

BlockIds = Sequence[BlockId] | npt.NDArray[np.integer]
"""One sequence's block table: ids in token order; entries after its last token are not read."""


def find_block_and_offset(block_ids: BlockIds, position: int, block_size: int) -> tuple[BlockId, int]:
    """Return the block that holds a token, and the token's offset in it.

    >>> find_block_and_offset([7, 2, 9], 6, block_size=4)
    (2, 2)

    Raises:
        InvalidArgumentError: a negative position, or one beyond the table.
    """
    _check_range(block_ids, position, position + 1, block_size)
    return BlockId(int(block_ids[position // block_size])), position % block_size


def list_slots(block_ids: BlockIds, start: int, stop: int, block_size: int) -> npt.NDArray[np.int64]:
    """Return the slots of the positions `[start, stop)`: block_id * block_size + offset, as for `KVStorage`.

    >>> list_slots([7, 2, 9], 2, 6, block_size=4).tolist()
    [30, 31, 8, 9]

    Raises:
        InvalidArgumentError: positions that are negative or beyond the table.
    """
    _check_range(block_ids, start, stop, block_size)
    positions = np.arange(start, stop, dtype=np.int64)
    table = np.asarray(block_ids, np.int64)
    return table[positions // block_size] * block_size + positions % block_size


def _check_range(block_ids: BlockIds, start: int, stop: int, block_size: int) -> None:
    num_slots = len(block_ids) * block_size
    if not 0 <= start <= stop <= num_slots:
        raise InvalidArgumentError(
            f"positions {start} to {stop - 1} are not in a table of {len(block_ids)} blocks, which has "
            f"{num_slots} of them"
        )


PAD_SLOT_ID: Final = -1
"""The slot of a padding entry; kernels write nothing for it. As in vLLM."""

Integers = npt.NDArray[np.integer[Any]] | Sequence[int]


class SlotMapping:
    """The slot of each token, block_id * block_size + offset, computed for all rows of a `BatchBlockTable`.

        query_start_loc    [0,            4, 5,     7]        rows 0, 1, 2 have 4, 1 and 2 tokens in this step
        first_positions    [8,           21, 3]               at positions 8 to 11, 21, and 3 to 4
        slots              [s  s  s  s  | s | s  s | -1 -1]   and 2 entries of padding

    Args:
        batch: the rows to use; call its `update` first.
        max_num_tokens: most tokens of a step, padding included.
        array: the array to write to; by default a new one. (max_num_tokens,), int64, contiguous.

    Attributes:
        slots: that array. The methods return views of it, valid until the next call.

    A token whose position has no block, or the null block, raises an error: its slots were not allocated,
    `update` was not called, or the request was freed. A slot of -1 would silently drop its K and V. Windows
    cause no such error: tokens that left a window are never written.
    """

    def __init__(
        self,
        batch: BatchBlockTable,
        max_num_tokens: int,
        *,
        array: npt.NDArray[np.int64] | None = None,
    ) -> None:
        max_num_tokens = as_count("max_num_tokens", max_num_tokens, 1)
        if array is None:
            array = np.empty(max_num_tokens, np.int64)
        elif array.shape != (max_num_tokens,) or array.dtype != np.int64 or not array.flags.c_contiguous:
            raise InvalidArgumentError(
                f"array is {array.dtype} of shape {array.shape}, not contiguous int64 of ({max_num_tokens},)"
            )
        self.batch = batch
        self.slots = array
        self.slots.fill(PAD_SLOT_ID)
        num_rows, num_columns = batch.block_ids.shape
        self._block_ids = batch.block_ids.reshape(-1)
        self._slots_per_row = num_columns * batch.block_size
        # A row's first place, counting slots as if all rows were one long table; one division finds its cell.
        self._row_starts = np.arange(num_rows, dtype=np.int64) * self._slots_per_row
        # Zero-dimensional arrays: a ufunc takes half as long over them as over an int.
        self._block_size = np.array(batch.block_size, np.int64)
        self._row_end = np.array(self._slots_per_row, np.uint64)
        self._counting = np.arange(max_num_tokens, dtype=np.int64)
        self._places = np.empty(max_num_tokens, np.int64)
        self._cells = np.empty(max_num_tokens, np.int64)
        self._found = np.empty(max_num_tokens, batch.block_ids.dtype)

    def fill_decode(self, positions: Integers, *, num_slots: int | None = None) -> npt.NDArray[np.int64]:
        """Return the slots of one token per request: row i at `positions[i]`.

        Args:
            positions: (n,), for the first n rows. If some have no token, or several, use `fill_chunks`.
            num_slots: length of the result, at least n (the default); the rest is padding, -1.
        Returns:
            (num_slots,), int64, a view of `slots`.
        Raises:
            InvalidArgumentError: more positions than rows, too long a result, a position without a block.
                Nothing has changed.
        """
        positions = _to_int64("positions", positions)
        num_tokens = len(positions)
        num_slots = self._check_lengths(num_tokens, num_tokens, num_slots)
        places = self._places[:num_tokens]
        # As unsigned numbers, negative positions are large, so one comparison checks both bounds.
        if np.count_nonzero(positions.view(np.uint64) >= self._row_end):
            self._raise_for(positions, np.arange(num_tokens))
        np.add(positions, self._row_starts[:num_tokens], out=places)
        return self._fill(places, num_slots)

    def fill_chunks(
        self, query_start_loc: Integers, first_positions: Integers, *, num_slots: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the slots of any number of tokens per request, 0 included, at consecutive positions.

        Args:
            query_start_loc: (n + 1,), as in vLLM: row i has the tokens `[query_start_loc[i],
                query_start_loc[i + 1])` of the step. Starts at 0, ascending.
            first_positions: (n,): the position of each row's first token, such as its `num_computed_tokens`.
            num_slots: length of the result, at least query_start_loc[-1] (the default); the rest is -1.
        Returns:
            (num_slots,), int64, a view of `slots`.
        Raises:
            InvalidArgumentError: arrays that do not fit together, more of them than rows, too long a result,
                a position without a block. Nothing has changed.
            InvalidTypeError: not integers. Nothing has changed.
        """
        query_start_loc = _to_int64("query_start_loc", query_start_loc)
        first_positions = _to_int64("first_positions", first_positions)
        num_rows = len(first_positions)
        if len(query_start_loc) != num_rows + 1:
            raise InvalidArgumentError(
                f"query_start_loc has {len(query_start_loc)} entries for {num_rows} first_positions; "
                f"it needs one more: the start of each row's tokens, and the end of the last row's"
            )
        starts = query_start_loc[:-1]
        counts = query_start_loc[1:] - starts
        if query_start_loc[0] != 0 or (num_rows and counts.min() < 0):
            raise InvalidArgumentError("query_start_loc does not start at 0, or decreases")
        num_tokens = int(query_start_loc[-1])
        num_slots = self._check_lengths(num_rows, num_tokens, num_slots)
        ends = first_positions + counts
        if ((counts > 0) & ((first_positions < 0) | (ends > self._slots_per_row))).any():
            positions = np.repeat(first_positions - starts, counts) + self._counting[:num_tokens]
            self._raise_for(positions, np.repeat(np.arange(num_rows), counts))
        places = self._places[:num_tokens]
        first_places = first_positions - starts + self._row_starts[:num_rows]
        np.add(np.repeat(first_places, counts), self._counting[:num_tokens], out=places)
        return self._fill(places, num_slots)

    def _check_lengths(self, num_rows: int, num_tokens: int, num_slots: int | None) -> int:
        """Return the length of the result."""
        if num_rows > self.batch.num_requests:
            raise InvalidArgumentError(
                f"positions for {num_rows} rows, but the batch has {self.batch.num_requests} requests"
            )
        length = num_tokens if num_slots is None else as_int("num_slots", num_slots)
        if not num_tokens <= length <= len(self.slots):
            raise InvalidArgumentError(
                f"num_slots is {length} for {num_tokens} tokens; it must not be below the number of tokens "
                f"or above max_num_tokens, {len(self.slots)}"
            )
        return length

    def _fill(self, places: npt.NDArray[np.int64], num_slots: int) -> npt.NDArray[np.int64]:
        """Fill `slots` for places within their rows, and pad it. Each line is one pass, without a copy."""
        num_tokens = len(places)
        cells, found, slots = self._cells[:num_tokens], self._found[:num_tokens], self.slots[:num_tokens]
        np.floor_divide(places, self._block_size, out=cells)
        self._block_ids.take(cells, out=found, mode="clip")  # in range; "raise" would make a copy
        if np.count_nonzero(found) < num_tokens:
            rows, positions = np.divmod(places, self._slots_per_row)
            self._raise_for(positions, rows)
        # block_id * block_size + offset, since offset is place - cell * block_size.
        np.subtract(found, cells, out=slots)
        slots *= self._block_size
        slots += places
        if num_slots > num_tokens:
            self.slots[num_tokens:num_slots] = PAD_SLOT_ID
        return self.slots[:num_slots]

    def _raise_for(self, positions: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> None:
        """Raise for the first of these tokens that has no slot."""
        batch = self.batch
        for position, row in zip(positions.tolist(), rows.tolist(), strict=True):
            column = position // batch.block_size
            row_ids = batch.block_ids[row]
            if not 0 <= column < len(row_ids) or row_ids[column] == NULL_BLOCK_ID:
                num_blocks = int(np.count_nonzero(row_ids))
                raise InvalidArgumentError(
                    f"request {batch.list_request_ids()[row]!r}, row {row}: no slot at position {position}, "
                    f"{num_blocks} blocks of {batch.block_size} tokens are in its row; call allocate_slots() "
                    f"for it, then update(). Was it freed?"
                )


def _to_int64(name: str, values: Integers) -> npt.NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidTypeError(
            f"{name} must be a one-dimensional array of integers, not {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64, copy=False)
