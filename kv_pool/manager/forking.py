"""`fork_tables`: start a second request in the blocks of a first one."""

from kv_pool.core.extra_keys import find_adapter_load, find_extra_keys
from kv_pool.core.taking import touch_listed
from kv_pool.errors import InvalidArgumentError
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.manager_state import ManagerState
from kv_pool.manager.requests.request import SchedulableRequest


def fork_tables(
    state: ManagerState, tables: list[BlockTable], parent: SchedulableRequest, child: SchedulableRequest
) -> None:
    """See `KVCacheManager.fork`.

    Args:
        tables: the parent's tables.
    """
    num_computed = parent.num_computed_tokens
    if child.request_id in state._tables:
        raise InvalidArgumentError(f"request {child.request_id!r} has blocks already")
    if child.num_computed_tokens != num_computed:
        raise InvalidArgumentError(
            f"request {parent.request_id!r} has {num_computed} computed tokens, but its fork "
            f"{child.request_id!r} has {child.num_computed_tokens}; set the child's count to the parent's"
        )
    num_hashes = num_computed // state.block_pool.hash_block_size
    if list(child.block_hashes[:num_hashes]) != list(parent.block_hashes[:num_hashes]):
        raise InvalidArgumentError(
            f"the first {num_computed} tokens of {child.request_id!r} are not those of its parent "
            f"{parent.request_id!r}: their hashes differ"
        )
    # The rest of the computed tokens has no hash yet, and its block may be shared and cached later.
    first = num_hashes * state.block_pool.hash_block_size
    if num_computed > first and (
        list(child.all_token_ids[first:num_computed]) != list(parent.all_token_ids[first:num_computed])
        or find_extra_keys(child, first, num_computed) != find_extra_keys(parent, first, num_computed)
        or find_adapter_load(child, True) != find_adapter_load(parent, True)
    ):
        raise InvalidArgumentError(
            f"the first {num_computed} tokens of {child.request_id!r} are not those of its parent "
            f"{parent.request_id!r}: tokens, adapter, salt or multimodal inputs from token {first} on differ"
        )
    for table, group in zip(tables, state._groups, strict=True):
        num_cached = table.num_cached_blocks * group.block_size
        if group.is_cacheable and num_computed < num_cached:
            raise InvalidArgumentError(
                f"request {parent.request_id!r} has blocks cached for {num_cached} tokens, but "
                f"num_computed_tokens is {num_computed}; update it before the fork"
            )
    copies: list[BlockTable] = [BlockTable() for _ in tables]
    pool = state.block_pool
    pool.is_changing = True
    for table, copy, group in zip(tables, copies, state._groups, strict=True):
        num_shared = len(table.blocks)
        if group.is_cacheable:
            num_shared = min(num_shared, group.count_table_blocks(num_computed))
        table.is_forked = True
        copy.is_forked = True
        copy.request = child
        copy.num_hits = table.num_hits
        copy.past = None if table.past is None else table.past.copy()
        copy.num_valid_tokens = table.num_valid_tokens
        copy.unaligned_position = table.unaligned_position
        if table.copy_position < num_shared:
            copy.copy_position = table.copy_position  # the last of the two to write keeps the block
        copy.num_cached_blocks = min(table.num_cached_blocks, num_shared)
        copy.num_null_blocks = min(table.num_null_blocks, num_shared)
        shared = table.blocks[:num_shared]
        touch_listed(pool, shared)
        copy.blocks += shared
        if table.past is not None and group.is_cacheable and num_computed % group.block_size:
            # The child may continue in the parent's copy of a block.
            for block in table.list_past(num_computed // group.block_size):
                start = num_computed - num_computed % group.block_size
                pool.origins.note_continued(block, start, child.block_hashes)
    state._has_forks = True
    if state._owners is not None:
        state._owners.note_forked(parent.request_id, child)
    state._tables[child.request_id] = copies
    pool.is_changing = False
