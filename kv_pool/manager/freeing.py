"""`free_tables`: release the blocks of a request."""

from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.manager_state import ManagerState
from kv_pool.manager.recovery import recover


def free_tables(state: ManagerState, request_id: RequestId, tables: list[BlockTable]) -> None:
    """See `KVCacheManager.free`. An interrupted call is completed."""
    retention = state.retention
    if retention is not None:
        retention.expire()
        if not retention.is_active:
            retention = None
    if state._rules is not None:
        state._rules.note_ended(tables)
    try:
        state._is_leaving = True
        state._leaving_id = request_id
        state._unsettled = tables
        del state._tables[request_id]
        for group_id, table in enumerate(tables):
            blocks = table.blocks
            if len(state.copies):
                state.copies.drop(blocks[table.num_null_blocks :])
            # In place: the table still lists the blocks that are not released yet.
            if table.num_null_blocks:
                del blocks[: table.num_null_blocks]
            if retention is not None:
                retention.label_table(request_id, GroupId(group_id), table.num_null_blocks, blocks)
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
