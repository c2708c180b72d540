"""Conversions between a token's position, its (block, offset) and its slot."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import BlockId

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


def find_position(block_ids: BlockIds, block_id: BlockId, offset: int, block_size: int) -> int:
    """Return the position of the token at (block, offset). O(len(block_ids)).

    >>> find_position([7, 2, 9], 2, 2, block_size=4)
    6

    Raises:
        InvalidBlockError: the block is not in the table.
        InvalidArgumentError: the offset is not within a block.
    """
    if not 0 <= offset < block_size:
        raise InvalidArgumentError(f"offset {offset} is not one of 0 to {block_size - 1}")
    for index, held in enumerate(block_ids):
        if held == block_id:
            return index * block_size + offset
    raise InvalidBlockError(f"block {block_id} is not in the block table {list(block_ids)}")


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
