"""Blocks in host memory as rows of bytes: a storage's own where they lie so, else those of a buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_pool.storage.block_storage import BlockStorage, make_host_buffer
from kv_pool.storage.segments import Segment, SegmentTable
from kv_pool.tiers.formats.block_format import BlockFormat

ByteRows = npt.NDArray[np.uint8]

RAW = "raw"
BUFFER_BYTES = 8 * 1024 * 1024
"""So many bytes of blocks at most are read or written in one piece of work; one block, where that is more."""


def count_batch_blocks(block_bytes: int) -> int:
    """Blocks that fit into a buffer."""
    return max(1, BUFFER_BYTES // block_bytes)


def view_rows(storage: BlockStorage) -> ByteRows | None:
    """The blocks of a storage as an array (num_blocks, block_bytes) on their own memory.

    None where they are not in host memory, or not in one piece each.
    """
    table = storage.segments
    if storage.device != "cpu" or len(table) != 1:
        return None
    stride, span = int(table.strides[0]), int(table.spans[0])
    memory = (ctypes.c_ubyte * ((table.num_blocks - 1) * stride + span)).from_address(int(table.bases[0]))
    return np.ndarray((table.num_blocks, span), np.uint8, memoryview(memory), strides=(stride, 1))


def wrap_rows(rows: ByteRows, block_format: str) -> BlockStorage:
    """Rows in one piece of memory, (n, block_bytes), as the blocks of a storage."""
    num_blocks, block_bytes = rows.shape
    row = Segment(rows.ctypes.data, block_bytes, block_bytes, rows)
    return BlockStorage(SegmentTable.from_segments([row], num_blocks), "cpu", block_format)


class RowBuffer:
    """Room for some blocks in host memory, one after the other; made when it is needed first.

    Attributes:
        num_blocks: that fit.
    """

    def __init__(self, block_bytes: int, block_format: str) -> None:
        self.num_blocks = count_batch_blocks(block_bytes)
        self._block_bytes = block_bytes
        self._block_format = block_format
        self._storage: BlockStorage | None = None

    @property
    def storage(self) -> BlockStorage:
        """The blocks as a storage."""
        if self._storage is None:
            self._storage = make_host_buffer(self._block_bytes, self.num_blocks, self._block_format)
        return self._storage

    @property
    def rows(self) -> ByteRows:
        """The blocks as an array (num_blocks, block_bytes)."""
        flat: ByteRows = self.storage.segments.owners[0]
        return flat.reshape(self.num_blocks, self._block_bytes)

    def gather(self, storage: BlockStorage, block_ids: Sequence[int]) -> ByteRows:
        """The bytes of these blocks: (n, block_bytes), where no copy is needed those of the storage itself.

        Args:
            block_ids: `num_blocks` of them at most.
        """
        rows = view_rows(storage)
        if rows is not None and is_ascending(block_ids):
            return rows[block_ids[0] : block_ids[0] + len(block_ids)]
        storage.copy_to(self.storage, [(source, target) for target, source in enumerate(block_ids)])
        return self.rows[: len(block_ids)]


def is_ascending(block_ids: Sequence[int]) -> bool:
    """Is each id the one after the id before it? One that is alone is."""
    return len(block_ids) > 0 and list(block_ids) == list(range(block_ids[0], block_ids[0] + len(block_ids)))


def skip_raw(block_format: BlockFormat | None) -> BlockFormat | None:
    """The format, or None for blocks that are kept as they are and need no coding."""
    return None if block_format is None or block_format.name == RAW else block_format
