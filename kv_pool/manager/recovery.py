"""`recover`: undo or complete an interrupted call of a manager."""

from kv_pool.core.block import KVCacheBlock
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.manager_state import ManagerState


def recover(state: ManagerState) -> None:
    """Undo an interrupted `allocate_slots` or `fork`, or complete a `free`. If interrupted, call it again.

    Blocks after the settled ones are freed. Blocks that the call cached are evicted, since no step computes
    them now.
    """
    pool = state.block_pool
    state.copies.recover()
    pool.free_out_of(state._taken)
    pool.free_out_of(state._leaving)
    for table in state._unsettled or ():
        if table.settled_blocks is not None and table.num_settled and not state._is_leaving:
            _restore_blocks(state, table, table.settled_blocks)
        blocks = table.blocks
        if state._is_leaving:
            table.num_settled = 0
            state.copies.drop(blocks)
        else:
            # Blocks that were cached before the call stay so; for a new request, these are the prefix.
            unwritten = [
                block.block_id for block in blocks[table.num_settled_cached :] if block.block_hash is not None
            ]
            pool.evict_blocks(unwritten)
            table.num_cached_blocks = min(table.num_cached_blocks, table.num_settled_cached)
        state._leaving = blocks[table.num_settled :][::-1]
        del blocks[table.num_settled :]
        pool.free_out_of(state._leaving)
    if state._leaving_id is not None and state.retention is not None:
        state.retention.forget_request(state._leaving_id)
    state._leaving_id = None
    state._unsettled = None


def _restore_blocks(state: ManagerState, table: BlockTable, settled: list[KVCacheBlock]) -> None:
    """Undo `extend_states` for a request that had blocks: free the new ones, restore the others."""
    kept = set(settled)
    leaving = [block for block in table.blocks if not block.is_null and block not in kept][::-1]
    state._leaving = leaving
    table.blocks[:] = settled
    table.num_speculative = table.num_settled_speculative
    table.settled_blocks = None
    state.block_pool.evict_blocks([block.block_id for block in leaving if block.ref_cnt == 1])
    state.block_pool.free_out_of(leaving)
