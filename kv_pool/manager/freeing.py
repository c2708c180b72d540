"""Blocks of a request go back to the pool."""

from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.manager_state import ManagerState
from kv_pool.manager.recovery import recover


def free_tables(state: ManagerState, request_id: str, tables: list[BlockTable]) -> None:
    """See `KVCacheManager.free`. An interrupt completes it."""
    retention = state.retention
    if retention is not None:
        retention.expire()
        if not retention.is_active:
            retention = None
    try:
        state._is_leaving = True
        state._leaving_id = request_id
        state._unsettled = tables
        del state._tables[request_id]
        for group_id, table in enumerate(tables):
            blocks = table.blocks
            if len(state.copies):
                state.copies.drop(blocks[table.num_null_blocks :])
            # In place: the table still has what is not given back.
            if table.num_null_blocks:
                del blocks[: table.num_null_blocks]
            if retention is not None:
                retention.label_table(request_id, group_id, table.num_null_blocks, blocks)
            blocks.reverse()
            state.block_pool.free_out_of(blocks)
        if retention is not None:
            retention.forget_request(request_id)
        state._leaving_id = None
        state._unsettled = None
    except BaseException:
        if state._unsettled is not None:
            recover(state)
        raise
