"""`BlockInfos`: a mapping from block id to `BlockInfo`, of the blocks that sequences hold."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kv_pool.adapter.holdings import Holdings
from kv_pool.errors import InvalidBlockError
from kv_pool.ids import BlockId
from kv_pool.protocol import BlockInfo


class HasBlockInfo(Protocol):
    """The methods of a `GPUKVPool` that `BlockInfos` calls."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Hold it to make several calls atomic."""

    @property
    def holdings(self) -> Holdings:
        """The sequences and the blocks that they hold."""

    def get_block_info(self, block_id: BlockId) -> BlockInfo:
        """See `GPUKVPool.get_block_info`."""


class BlockInfos(Mapping[BlockId, BlockInfo]):
    """A live, read-only mapping from id to `BlockInfo`, lowest id first, of the blocks that sequences hold.

    An iteration covers the blocks that were held when it began; `items()` and `values()` are snapshots. Each
    is O(blocks in use); use `blocks_of(sequence_id)` for the blocks of one sequence.
    """

    def __init__(self, pool: HasBlockInfo) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return len(self._pool.holdings.first_holders)

    def __iter__(self) -> Iterator[BlockId]:
        with self._pool.lock:
            return iter(sorted(block.block_id for block in self._pool.holdings.first_holders))

    def __getitem__(self, block_id: BlockId) -> BlockInfo:
        try:
            info = self._pool.get_block_info(block_id)
        except InvalidBlockError:
            raise KeyError(block_id) from None
        if not info.sequence_ids:
            raise KeyError(block_id)
        return info

    def items(self) -> ItemsView[BlockId, BlockInfo]:
        """Return a snapshot of ids and infos."""
        return self._copy().items()

    def values(self) -> ValuesView[BlockInfo]:
        """Return a snapshot of the infos."""
        return self._copy().values()

    def _copy(self) -> dict[BlockId, BlockInfo]:
        with self._pool.lock:
            return {block_id: self._pool.get_block_info(block_id) for block_id in self}
