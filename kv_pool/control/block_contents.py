"""`BlockContents`: made-up bytes for the blocks of a live replay, derived from their hashes."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from kv_pool.ids import BlockHash, BlockId
from kv_pool.storage.block_storage import BlockStorage


class BlockContents:
    """The memory of a pool's blocks. The bytes of a block are derived from its hash and checked against it.

    Args:
        num_blocks: number of blocks, the null block included.
        block_bytes: size of each block.

    Attributes:
        storage: the memory as the `BlockStorage` of the pool.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._rows = np.zeros((num_blocks, block_bytes), np.uint8)
        self.storage = BlockStorage.wrap_state([self._rows])

    def write(self, block_ids: Sequence[BlockId], names: Sequence[BlockHash]) -> None:
        """Fill each block with the bytes that belong to its name, a block hash."""
        for block_id, name in zip(block_ids, names, strict=True):
            self._rows[block_id] = self._make_bytes(name)

    def find_wrong(self, block_ids: Sequence[BlockId], names: Sequence[BlockHash]) -> list[BlockId]:
        """Return the ids of the blocks whose bytes do not match their names."""
        return [
            block_id
            for block_id, name in zip(block_ids, names, strict=True)
            if not np.array_equal(self._rows[block_id], self._make_bytes(name))
        ]

    def _make_bytes(self, name: BlockHash) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
        digest = np.frombuffer(blake2b(name).digest(), np.uint8)
        return np.resize(digest, self._rows.shape[1])
