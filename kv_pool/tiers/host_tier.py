"""`HostTier`: blocks in one slab of host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kv_pool.core.kv_events import MEDIUM_CPU
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHashWithGroupId, BlockId
from kv_pool.storage.block_storage import BlockStorage, make_host_buffer
from kv_pool.storage.segments import SegmentTable
from kv_pool.tiers.block_rows import ByteRows, RowBuffer, as_block_ids, skip_raw
from kv_pool.tiers.formats.block_format import BlockFormat
from kv_pool.tiers.tier import Tier, TierRead


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
            self._storage = allocate_slab(capacity, beside)
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
        slots = self._slots.list_next(len(keys))
        if self._storage is not None:
            storage.copy_to(self._storage, list(zip(block_ids, as_block_ids(slots), strict=True)))
        else:
            assert self._format is not None
            self._encoded[slots] = self._format.encode(self._buffer.gather(storage, block_ids))
        return super().put(keys)

    def read(self, keys: Sequence[BlockHashWithGroupId]) -> TierRead:
        slots = [self._slots.slot_of[key] for key in keys]
        self._counts.num_read += len(keys)
        if self._storage is not None:
            return TierRead(keys, self._storage, as_block_ids(slots))
        assert self._format is not None
        self._buffer.rows[: len(slots)] = self._format.decode(self._encoded[slots])
        return TierRead(keys, self._buffer.storage, as_block_ids(range(len(slots))))


def allocate_slab(num_blocks: int, beside: BlockStorage) -> BlockStorage:
    """Allocate a contiguous host storage for `num_blocks` blocks of `beside`; pinned if that is on a GPU."""
    if beside.device == "cpu":
        return make_host_buffer(beside.block_bytes, num_blocks, beside.block_format)
    import torch

    slab = torch.empty(num_blocks * beside.block_bytes, dtype=torch.uint8, pin_memory=True)
    table = SegmentTable.of_adjacent(slab.data_ptr(), beside.block_bytes, num_blocks, slab)
    return BlockStorage(table, "cpu", beside.block_format)
