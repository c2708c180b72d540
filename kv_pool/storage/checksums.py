"""Checksums of blocks: xxh3_64 of a block's bytes, independent of their layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kv_pool.ids import BlockId
from kv_pool.storage.block_storage import BlockStorage, make_host_buffer
from kv_pool.storage.segments import IntArray, SegmentTable, make_block_ids

# Host buffer for blocks of a GPU: large enough to keep the bus busy.
_BUFFER_BYTES = 16 * 1024 * 1024


def checksum_blocks(storage: BlockStorage, block_ids: Sequence[BlockId] | IntArray) -> npt.NDArray[np.uint64]:
    """Return the xxh3_64 of each block's bytes in the order of `block_format`, whatever their layout.

    Returns:
        (n,), uint64, in the order of the ids; ids may be repeated.
    Raises:
        InvalidBlockError: an id is out of range.

    Host memory is read in place, and a contiguous block in one call. Blocks on a GPU pass through a buffer of
    16 MiB, or of one block if that is larger.
    Cost: one read of the bytes, at memory bandwidth.
    """
    ids = make_block_ids(block_ids, storage.num_blocks)
    if storage.device == "cpu":
        return _checksum_spans(storage.segments, ids)
    sums = np.empty(len(ids), np.uint64)
    step = min(max(1, len(ids)), max(1, _BUFFER_BYTES // storage.block_bytes))
    buffer = make_host_buffer(storage.block_bytes, step, storage.block_format)
    for start in range(0, len(ids), step):
        some = ids[start : start + step]
        places = np.arange(len(some), dtype=np.int64)
        storage.copy_to(buffer, np.stack([some, places], axis=1))
        sums[start : start + step] = _checksum_spans(buffer.segments, places)
    return sums


def _checksum_spans(table: SegmentTable, block_ids: IntArray) -> npt.NDArray[np.uint64]:
    sums = np.empty(len(block_ids), np.uint64)
    for place, block_id in enumerate(block_ids.tolist()):
        digest = xxhash.xxh3_64()
        for view in table.list_block_views(block_id):
            digest.update(view)
        sums[place] = digest.intdigest()
    return sums
