"""`free_tables`, `truncate_tables`: release the blocks of a request, or those of withdrawn tokens."""

from kv_pool.core.evicting import evict_invalid
from kv_pool.core.freeing import free_listed
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.mamba_group import MambaGroup
from kv_pool.manager.block_groups.scratch_group import SingleStateGroup
from kv_pool.manager.manager_state import ManagerState


def free_tables(state: ManagerState, request_id: RequestId, tables: list[BlockTable]) -> None:
    """See `KVCacheManager.free`."""
    retention = state.retention
    if retention is not None:
        retention.expire()
        if not retention.is_active:
            retention = None
    pool = state.block_pool
    pool.is_changing = True
    if state._rules is not None:
        state._rules.note_ended(tables)
    if state._owners is not None:
        state._owners.note_ended(request_id)
        state._caching.uncached.discard(request_id)
    del state._tables[request_id]
    for group_id, table in enumerate(tables):
        first = table.num_null_blocks
        leaving = table.blocks[first:]  # a copy: a caller may still read the table's own list
        if len(state.copies):
            state.copies.drop(leaving)
        if retention is not None:
            retention.label_table(request_id, GroupId(group_id), first, leaving)
        leaving.reverse()
        free_listed(pool, leaving)
    if retention is not None:
        retention.forget_request(request_id)
    pool.is_changing = False


def truncate_tables(
    state: ManagerState, request_id: RequestId, tables: list[BlockTable], num_computed: int, num_tokens: int
) -> None:
    """Release the blocks after the first `num_tokens` tokens; see `KVCacheManager.truncate`.

    A block that is no longer full is written again: it loses its hash, and is replaced if others hold it.
    """
    for group in state._groups:
        table = tables[group.group_id]
        if not group.is_cacheable:
            continue
        if num_computed < table.num_cached_blocks * group.block_size:
            raise InvalidArgumentError(
                f"request {request_id!r} has blocks cached for {table.num_cached_blocks * group.block_size} "
                f"tokens, but num_computed_tokens is {num_computed}; update it before truncate()"
            )
        first = group.count_skipped_tokens(num_tokens) // group.block_size
        read = table.blocks[first : num_tokens // group.block_size + 1]
        if num_tokens < num_computed and (
            isinstance(group, (MambaGroup, SingleStateGroup)) or any(block.is_null for block in read)
        ):
            raise InvalidArgumentError(
                f"request {request_id!r} cannot go back from {num_computed} to {num_tokens} computed tokens: "
                f"group {group.group_id} has only the state, or the window, of a later token. Free the "
                "request, truncate it, and admit it again"
            )
    retention = state.retention
    pool = state.block_pool
    pool.is_changing = True
    for group in state._groups:
        if not group.is_cacheable or isinstance(group, (MambaGroup, SingleStateGroup)):
            continue
        table = tables[group.group_id]
        num_left = group.count_table_blocks(num_tokens)
        position = num_tokens // group.block_size
        leaving = table.blocks[num_left:]
        if leaving:
            if len(state.copies):
                state.copies.drop(leaving)
            if retention is not None and retention.is_active:
                retention.label_table(request_id, group.group_id, num_left, leaving)
            del table.blocks[num_left:]
            table.num_edits += 2  # more than one, so that no reader takes it for entries that became null
            free_listed(pool, leaving[::-1])
        table.num_cached_blocks = min(table.num_cached_blocks, position)
        if position < len(table.blocks):
            block = table.blocks[position]
            if block.num_key_tokens > num_tokens:
                evict_invalid(pool, [block])
            if block.ref_cnt > 1:
                table.is_forked = state._has_forks = True
    pool.is_changing = False
