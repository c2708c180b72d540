"""`BlockInfos`: the blocks that sequences hold, by id, as a mapping."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kv_pool.adapter.holdings import Holdings
from kv_pool.errors import InvalidBlockError
from kv_pool.protocol import BlockInfo


class HasBlockInfo(Protocol):
    """The methods of a `GPUKVPool` that `BlockInfos` calls."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while several of its calls have to be one."""

    @property
    def holdings(self) -> Holdings:
        """Which sequences hold which blocks."""

    def get_block_info(self, block_id: int) -> BlockInfo:
        """See `GPUKVPool.get_block_info`."""


class BlockInfos(Mapping[int, BlockInfo]):
    """A live, read-only view of a pool: id to `BlockInfo`, lowest id first, for blocks in use by sequences.

    A walk is over the blocks that were held when it began; `items()` and `values()` describe one moment. Each
    O(blocks in use): ask `blocks_of(sequence_id)` for the blocks of one sequence.
    """

    def __init__(self, pool: HasBlockInfo) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return len(self._pool.holdings.first_holders)

    def __iter__(self) -> Iterator[int]:
        with self._pool.lock:
            return iter(sorted(block.block_id for block in self._pool.holdings.first_holders))

    def __getitem__(self, block_id: int) -> BlockInfo:
        try:
            info = self._pool.get_block_info(block_id)
        except InvalidBlockError:
            raise KeyError(block_id) from None
        if not info.sequence_ids:
            raise KeyError(block_id)
        return info

    def items(self) -> ItemsView[int, BlockInfo]:
        """Ids and infos of one moment."""
        return self._copy().items()

    def values(self) -> ValuesView[BlockInfo]:
        """Infos of one moment."""
        return self._copy().values()

    def _copy(self) -> dict[int, BlockInfo]:
        with self._pool.lock:
            return {block_id: self._pool.get_block_info(block_id) for block_id in self}
