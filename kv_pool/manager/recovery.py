"""`recover`: undo or complete an interrupted call of a manager."""

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
