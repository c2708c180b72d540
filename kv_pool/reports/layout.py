"""`PoolLayout`: what every block of a pool is at one moment, and which blocks make a run of one sequence."""

from collections.abc import Collection, Sequence
from itertools import chain
from operator import attrgetter

import msgspec

from kv_pool.contiguous.fragmentation import get_fragmentation_rate
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.reports.block_states import BlockState, list_free_runs, read_states


class PoolLayout(msgspec.Struct, frozen=True):
    """A pool's blocks by id, one byte each; in JSON the bytes are base64.

        >>> from kv_pool import BlockAllocationRequest, GPUKVPool
        >>> pool = GPUKVPool(total_blocks=7, block_size=16, run_length=2)
        >>> pool.allocate(BlockAllocationRequest(num_blocks=2, sequence_id=1))
        [2, 3]
        >>> pool.allocate(BlockAllocationRequest(num_blocks=1, sequence_id=2, pinned=True))
        [1]
        >>> layout = pool.get_layout()
        >>> list(layout.states), list(layout.joins), list(layout.holders)
        ([0, 4, 3, 3, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0, 0, 0])
        >>> layout.num_blocks, layout.num_free, layout.list_free_runs(), layout.fragmentation_rate
        (7, 4, [4], 0.0)

    Attributes:
        block_size: tokens per block.
        run_length: what `fragmentation_rate` is about.
        epoch: how many times ids had been exchanged; an id means the same block at the same epoch only.
        states: a `BlockState` for each id from 0, the null block. Free blocks whose reuse somebody waits for
            are cached.
        joins: 1 where a sequence has block `id - 1` right before block `id`, else 0. A stretch of ones, with
            the block before it, is a run of one sequence, or of several that share it.
        holders: how many sequences hold the block, 255 for more. A block in use that no sequence holds was
            taken from the pool underneath.
    """

    block_size: int
    run_length: int
    epoch: int
    device_id: int
    states: bytes
    joins: bytes
    holders: bytes

    @property
    def num_blocks(self) -> int:
        """Without the null block."""
        return len(self.states) - 1

    @property
    def num_free(self) -> int:
        """Blocks that are empty or cached."""
        return self.states.count(BlockState.EMPTY) + self.states.count(BlockState.CACHED)

    @property
    def fragmentation_rate(self) -> float:
        """As `PoolStatistics.fragmentation_rate`."""
        return get_fragmentation_rate(self.list_free_runs(), self.run_length)

    def list_free_runs(self) -> list[int]:
        """The lengths of the maximal runs of free blocks, by id. O(number of blocks)."""
        return list_free_runs(self.states)


def read_layout(
    pool: BlockPoolCore,
    tables: Sequence[Collection[KVCacheBlock]],
    *,
    block_size: int,
    run_length: int,
    device_id: int,
) -> PoolLayout:
    """Return the layout of a pool whose sequences have these tables, see `read_tables`."""
    states = read_states(pool)
    joins, holders = read_tables(len(states), tables)
    return PoolLayout(block_size, run_length, pool.epoch, device_id, states, joins, holders)


def read_tables(num_ids: int, tables: Sequence[Collection[KVCacheBlock]]) -> tuple[bytes, bytes]:
    """`PoolLayout.joins` and `PoolLayout.holders`, from each sequence's blocks in its order.

    Args:
        num_ids: how many ids the pool has, the null block's included.
        tables: none has a block twice, but for the null block, which is not counted.
    Cost: O(num_ids + blocks in the tables).
    """
    import numpy as np

    tables = [table for table in tables if table]
    ends = np.cumsum([len(table) for table in tables], dtype=np.int64)
    num_held = int(ends[-1]) if len(ends) else 0
    # One table after the other, read without a step of Python per block.
    ids = np.fromiter(map(attrgetter("block_id"), chain.from_iterable(tables)), np.int64, num_held)
    is_joined = ids[1:] == ids[:-1] + 1
    is_joined[ends[:-1] - 1] = False  # the next table begins
    is_joined &= ids[:-1] != 0
    joins = np.zeros(num_ids, np.uint8)
    joins[ids[1:][is_joined]] = 1
    holders = np.minimum(np.bincount(ids, minlength=num_ids), _MOST_HOLDERS).astype(np.uint8)
    holders[0] = 0
    return joins.tobytes(), holders.tobytes()


_MOST_HOLDERS = 255
