"""`PoolLayout`: the `BlockState` of every block of a pool at one moment, and the runs of its sequences."""

from collections.abc import Collection, Sequence
from enum import IntEnum
from itertools import chain
from operator import attrgetter

import msgspec

from kv_pool.contiguous.fragmentation import get_fragmentation_rate
from kv_pool.contiguous.run_index import EMPTY, IN_USE
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore


class BlockState(IntEnum):
    """The state of a block. EMPTY and CACHED blocks are free.

    IMMOVABLE blocks are in use and keep their ids: pinned by the user, or held by a transfer or an open plan.
    """

    NULL = 0
    EMPTY = 1
    CACHED = 2
    IN_USE = 3
    IMMOVABLE = 4


def read_states(pool: BlockPoolCore) -> bytes:
    """Return the `BlockState` of each block by id, starting with the null block 0.

    Free blocks without a hash but with a reuse watcher are CACHED.
    Cost: O(number of blocks); a few nanoseconds per block of a `RunBlockPool`, some tens of a `BlockPool`.
    """
    states = read_states_of(pool, slice(None))
    states[0] = BlockState.NULL
    for block_id in pool.holds.list_immovable_ids():
        if states[block_id] == BlockState.IN_USE:
            states[block_id] = BlockState.IMMOVABLE
        elif states[block_id] == BlockState.EMPTY:  # free, without a hash, with a reuse watcher
            states[block_id] = BlockState.CACHED
    return bytes(states)


def read_states_of(pool: BlockPoolCore, ids: slice) -> bytearray:
    """Return the state of these blocks, without regard to holds: EMPTY, CACHED or IN_USE."""
    if isinstance(pool, RunBlockPool):
        return pool.run_index.ages[ids].translate(_STATES_BY_AGE)
    in_use, empty, cached = map(int, (BlockState.IN_USE, BlockState.EMPTY, BlockState.CACHED))
    return bytearray(
        in_use if block.ref_cnt else empty if block.key is None else cached for block in pool.blocks[ids]
    )


def list_free_runs(states: bytes) -> list[int]:
    """Return the lengths of the maximal runs of free blocks, in id order. O(number of blocks)."""
    return [len(run) for run in states.translate(_IS_FREE).split(b"\0") if run]


_STATES_BY_AGE = bytes(
    BlockState.IN_USE if age == IN_USE else BlockState.EMPTY if age == EMPTY else BlockState.CACHED
    for age in range(256)
)
_IS_FREE = bytes(state in (BlockState.EMPTY, BlockState.CACHED) for state in range(256))


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
        run_length: run length in blocks that `fragmentation_rate` refers to.
        epoch: number of id swaps so far. An id is guaranteed to mean the same block only at the same epoch.
        states: a `BlockState` for each id, starting with the null block 0. Free blocks with a reuse watcher
            are CACHED.
        joins: 1 if a sequence has block `id - 1` directly before block `id`, else 0. Consecutive ones,
            with the block before them, are a run of one sequence, or of several that share it.
        holders: number of sequences that use the block, at most 255. A block in use with 0 was allocated
            from the block pool directly.
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
        """The number of blocks, without the null block."""
        return len(self.states) - 1

    @property
    def num_free(self) -> int:
        """The number of empty and cached blocks."""
        return self.states.count(BlockState.EMPTY) + self.states.count(BlockState.CACHED)

    @property
    def fragmentation_rate(self) -> float:
        """The same as `PoolStatistics.fragmentation_rate`."""
        return get_fragmentation_rate(self.list_free_runs(), self.run_length)

    def list_free_runs(self) -> list[int]:
        """Return the lengths of the maximal runs of free blocks, in id order. O(number of blocks)."""
        return list_free_runs(self.states)


def read_tables(num_ids: int, tables: Sequence[Collection[KVCacheBlock]]) -> tuple[bytes, bytes]:
    """Return `PoolLayout.joins` and `PoolLayout.holders` for these block tables.

    Args:
        num_ids: number of ids of the pool, that of the null block included.
        tables: each sequence's blocks in order. Only the null block may be repeated in a table; it is not
            counted.
    Cost: O(num_ids + blocks in the tables).
    """
    import numpy as np

    tables = [table for table in tables if table]
    ends = np.cumsum([len(table) for table in tables], dtype=np.int64)
    num_held = int(ends[-1]) if len(ends) else 0
    # All tables concatenated, without interpreted code per block.
    ids = np.fromiter(map(attrgetter("block_id"), chain.from_iterable(tables)), np.int64, num_held)
    is_joined = ids[1:] == ids[:-1] + 1
    is_joined[ends[:-1] - 1] = False  # a new table begins here
    is_joined &= ids[:-1] != 0
    joins = np.zeros(num_ids, np.uint8)
    joins[ids[1:][is_joined]] = 1
    holders = np.minimum(np.bincount(ids, minlength=num_ids), _MOST_HOLDERS).astype(np.uint8)
    holders[0] = 0
    return joins.tobytes(), holders.tobytes()


_MOST_HOLDERS = 255
