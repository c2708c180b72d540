"""`free_tables`, `truncate_tables`, `release_blocks`: release the blocks of requests."""

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.evicting import evict_invalid
from kv_pool.core.freeing import free_listed
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.block_groups.block_group import SingleStateGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.mamba_group import MambaGroup
from kv_pool.manager.manager_state import ManagerState


def free_tables(state: ManagerState, request_id: RequestId, tables: list[BlockTable]) -> None:
    """See `KVCacheManager.free`."""
    if state.retention is not None:
        state.retention.expire()  # before these blocks, others become the next to be reused
    state.block_pool.is_changing = True
    del state._tables[request_id]
    for group_id, table in enumerate(tables):
        first = table.num_null_blocks  # a slice of its own, which is reversed; the listeners read the table
        release_blocks(state, request_id, GroupId(group_id), first, table.blocks[first:])
    for listener in state.listeners:
        listener.note_ended(request_id, tables)
    state.block_pool.is_changing = False


def release_blocks(
    state: ManagerState, request_id: RequestId, group_id: GroupId, first: int, blocks: list[KVCacheBlock]
) -> None:
    """Drop a request's references to blocks of its table, and the copies into them; the last one goes first.

    Args:
        first: the table index of the first block.
        blocks: head first; a list of the caller's own, which is reversed.
    """
    for listener in state.listeners:
        listener.note_leaving(request_id, group_id, first, blocks)
    if len(state.copies):
        state.copies.drop(blocks)
    blocks.reverse()
    free_listed(state.block_pool, blocks)


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
            del table.blocks[num_left:]
            table.num_edits += 2  # more than one, so that no reader takes it for entries that became null
            release_blocks(state, request_id, group.group_id, num_left, leaving)
        table.num_cached_blocks = min(table.num_cached_blocks, position)
        if position < len(table.blocks):
            block = table.blocks[position]
            if block.num_key_tokens > num_tokens:
                evict_invalid(pool, [block])
            if block.ref_cnt > 1:
                table.is_forked = state._has_forks = True
    pool.is_changing = False
