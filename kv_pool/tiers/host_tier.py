"""`HostTier`: blocks in one slab of host memory; blocks in host memory as rows of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from kv_pool.core.kv_events import MEDIUM_CPU
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHashWithGroupId, BlockId, is_run
from kv_pool.storage.block_storage import BlockStorage, make_buffer_beside, make_host_buffer
from kv_pool.tiers.formats.block_format import BlockFormat
from kv_pool.tiers.tier import Tier, TierRead

ByteRows = npt.NDArray[np.uint8]

RAW = "raw"
BUFFER_BYTES = 8 * 1024 * 1024
"""Maximum number of bytes that one read or write covers. A larger block is read or written alone."""


def view_rows(storage: BlockStorage) -> ByteRows | None:
    """Return a (num_blocks, block_bytes) uint8 view of a storage's memory.

    Return None if the blocks are not in host memory, or if a block is not contiguous.
    """
    table = storage.segments
    if storage.device != "cpu" or len(table) != 1:
        return None
    return table.view_row(0)[:, None].view(np.uint8)


class RowBuffer:
    """A contiguous buffer for blocks in host memory. The operating system commits its pages on first use.

    Attributes:
        num_blocks: number of blocks that fit.
        storage: the buffer as a storage.
        rows: the buffer as an array, (num_blocks, block_bytes) uint8.
    """

    def __init__(self, block_bytes: int, block_format: str, num_bytes: int = BUFFER_BYTES) -> None:
        self.num_blocks = max(1, num_bytes // block_bytes)
        self.storage = make_host_buffer(block_bytes, self.num_blocks, block_format)
        self.rows: ByteRows = self.storage.segments.owners[0]

    def gather(self, storage: BlockStorage, block_ids: Sequence[BlockId]) -> ByteRows:
        """Return the bytes of these blocks, (n, block_bytes) uint8.

        The result is a view of the storage if the block ids are consecutive and the storage allows it;
        otherwise the blocks are copied into this buffer.

        Args:
            block_ids: at most `num_blocks` ids.
        """
        rows = view_rows(storage)
        if rows is not None and is_run(block_ids):
            return rows[block_ids[0] : block_ids[0] + len(block_ids)]
        storage.copy_to(self.storage, list(zip(block_ids, as_block_ids(range(len(block_ids))), strict=True)))
        return self.rows[: len(block_ids)]


def as_block_ids(numbers: Sequence[int]) -> Sequence[BlockId]:
    """Return slots, or rows of a buffer, as the ids of the blocks there. Copies nothing."""
    return cast("Sequence[BlockId]", numbers)


def skip_raw(block_format: BlockFormat | None) -> BlockFormat | None:
    """Return the format, or None if it is `raw` and needs no coding."""
    return None if block_format is None or block_format.name == RAW else block_format


class HostTier(Tier):
    """A tier that stores blocks in host memory.

    The memory is reserved at construction; the operating system commits its pages when blocks are stored.

    Args:
        capacity: maximum number of blocks.
        beside: the storage that the blocks come from. If it is on a GPU, the tier's memory is pinned.
        block_format: how blocks are encoded. None stores raw bytes, copied directly from and to the device;
            any other format encodes on the CPU, through a buffer.
        medium: the medium of its blocks in events and statistics.
    """

    has_bytes = True

    def __init__(
        self,
        capacity: int,
        beside: BlockStorage,
        block_format: BlockFormat | None = None,
        medium: str = MEDIUM_CPU,
    ) -> None:
        super().__init__(capacity, medium)
        self._format = skip_raw(block_format)
        self._buffer = RowBuffer(beside.block_bytes, beside.block_format)
        self._storage: BlockStorage | None = None
        if self._format is None:
            self._counts.block_bytes = beside.block_bytes
            self._storage = make_buffer_beside(beside, capacity, is_on_host=True)
            self._encoded: ByteRows = np.empty((0, 0), np.uint8)
        else:
            self._counts.block_bytes = self._format.encoded_bytes
            self.batch_blocks = self._buffer.num_blocks
            self._encoded = np.empty((capacity, self._format.encoded_bytes), np.uint8)

    def put(
        self,
        keys: Sequence[BlockHashWithGroupId],
        storage: BlockStorage | None = None,
        block_ids: Sequence[BlockId] = (),
    ) -> list[BlockHashWithGroupId]:
        """Store blocks as `Tier.put` does.

        Raises:
            CopyFailedError: the copy failed. The tier has none of the keys.
        """
        if storage is None or len(block_ids) != len(keys):
            raise InvalidArgumentError(f"{len(block_ids)} blocks for {len(keys)} keys")
        slots = self._list_next_slots(len(keys))
        if self._storage is not None:
            storage.copy_to(self._storage, list(zip(block_ids, as_block_ids(slots), strict=True)))
        else:
            assert self._format is not None
            self._encoded[slots] = self._format.encode(self._buffer.gather(storage, block_ids))
        return super().put(keys)

    def read(self, keys: Sequence[BlockHashWithGroupId]) -> TierRead:
        slots = [self._slot_of[key] for key in keys]
        self._counts.num_read += len(keys)
        if self._storage is not None:
            return TierRead(keys, self._storage, as_block_ids(slots))
        assert self._format is not None
        self._buffer.rows[: len(slots)] = self._format.decode(self._encoded[slots])
        return TierRead(keys, self._buffer.storage, as_block_ids(range(len(slots))))
