"""`BlockState`: the state of each block of a pool, one byte per block; lengths of free runs."""

from enum import IntEnum

from kv_pool.contiguous.ages import EMPTY, IN_USE
from kv_pool.contiguous.run_pool_core import RunPoolCore
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
    if isinstance(pool, RunPoolCore):
        states = pool.run_index.ages.translate(_STATES_BY_AGE)
    else:
        states = bytearray(
            BlockState.IN_USE
            if block.ref_cnt
            else BlockState.EMPTY
            if block.block_hash is None
            else BlockState.CACHED
            for block in pool.blocks
        )
    states[0] = BlockState.NULL
    for block_id in pool.holds.list_immovable_ids():
        if states[block_id] == BlockState.IN_USE:
            states[block_id] = BlockState.IMMOVABLE
        elif states[block_id] == BlockState.EMPTY:  # free, without a hash, with a reuse watcher
            states[block_id] = BlockState.CACHED
    return bytes(states)


def count_states(states: bytes) -> dict[BlockState, int]:
    """Return the number of blocks in each state."""
    return {state: states.count(state) for state in BlockState}


def list_free_runs(states: bytes) -> list[int]:
    """Return the lengths of the maximal runs of free blocks, in id order. O(number of blocks)."""
    return [len(run) for run in states.translate(_IS_FREE).split(b"\0") if run]


_STATES_BY_AGE = bytes(
    BlockState.IN_USE if age == IN_USE else BlockState.EMPTY if age == EMPTY else BlockState.CACHED
    for age in range(256)
)
_IS_FREE = bytes(state in (BlockState.EMPTY, BlockState.CACHED) for state in range(256))
