"""`recover`: undo or complete what an interrupted call of a manager left."""

from kv_pool.manager.manager_state import ManagerState


def recover(state: ManagerState) -> None:
    """Undo an interrupted `allocate_slots` or `fork`, or complete a `free`. An interrupt here, too, leaves a
    state from which it can be called again.

    Blocks behind those that were settled are given back. What the call made findable is evicted, since no
    step computes it now.
    """
    pool = state.block_pool
    state.copies.recover()
    pool.free_out_of(state._taken)
    pool.free_out_of(state._leaving)
    for table in state._unsettled or ():
        blocks = table.blocks
        if state._is_leaving:
            table.num_settled = 0
            state.copies.drop(blocks)
        else:
            # What was cached before, of a new request the prefix, stays.
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
