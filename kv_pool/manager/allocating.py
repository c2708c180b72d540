"""The changes that `allocate_slots` makes to a request's block tables; `recover` can undo each of them."""

from collections.abc import Sequence

from kv_pool.core.arguments import as_list
from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import RequestId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.manager_state import ManagerState
from kv_pool.manager.step import Step


def start_tables(state: ManagerState, tables: list[BlockTable], step: Step) -> None:
    """Append a table with the hits for each group; entries before a window are null blocks."""
    pool = state.block_pool
    for group in state._groups:
        table = BlockTable()
        tables.append(table)
        used = step.prefix_blocks[group.group_id]
        num_skipped = 0
        if group.forgets:
            num_skipped = group.count_skipped_tokens(step.num_before) // group.block_size
        if not used and not num_skipped:
            continue
        if num_skipped:
            used = used[num_skipped:]
            table.blocks.extend([pool.null_block] * num_skipped)
            table.num_null_blocks = num_skipped
        if not isinstance(used, list):
            used = as_list("cached_prefix", used)
        pool.touch_onto(used, table.blocks)
        if state.retention is not None and state.retention.holds_blocks:
            state.retention.note_taken(used)
        table.num_cached_blocks = len(table.blocks)
        table.num_settled_cached = table.num_cached_blocks


def extend_tables(
    state: ManagerState,
    tables: list[BlockTable],
    num_tokens: int,
    num_lookahead_tokens: int,
    num_encoder_tokens: int,
) -> tuple[Sequence[KVCacheBlock], ...]:
    """Append new blocks until each table has slots for the step's tokens; return the appended blocks."""
    added: list[Sequence[KVCacheBlock]] = []
    for group in state._groups:
        table = tables[group.group_id]
        num_blocks = group.count_table_blocks(num_tokens, num_lookahead_tokens, num_encoder_tokens)
        num_new = group.count_new_blocks(len(table.blocks), num_blocks)
        if not num_new:
            added.append(state._no_blocks[0])
            continue
        num_before = len(table.blocks)
        blocks = state._taken if group.adds_null_blocks else table.blocks
        if state._run_pool is not None and table.blocks and not table.blocks[-1].is_null:
            taken = state._run_pool.take_onto_after(blocks, table.blocks[-1], num_new)
        else:
            taken = state.block_pool.take_onto(blocks, num_new)
        if group.adds_null_blocks:
            # Move from one list to the other without a call in between.
            new_entries = group.pad(table, num_blocks, blocks)
            table.blocks += new_entries
            state._taken = []
            taken = table.blocks[num_before:]
        added.append(taken)
    return tuple(added)


def free_skipped_blocks(
    state: ManagerState, request_id: RequestId, tables: list[BlockTable], num_computed: int
) -> None:
    """Free the blocks that no later token attends to, last block first; null blocks replace them."""
    null_block = state.block_pool.null_block
    for group in state._groups:
        if not group.forgets:
            continue
        table = tables[group.group_id]
        blocks = table.blocks
        end = min(group.count_skipped_tokens(num_computed) // group.block_size, len(blocks))
        if end <= table.num_null_blocks:
            continue
        first = table.num_null_blocks
        passed = blocks[first:end]
        if all(block.is_null for block in passed):
            table.num_null_blocks = end
            continue  # all null: between two states
        if len(state.copies):
            state.copies.drop(passed)
        backwards = passed[::-1]
        if state.retention is not None and state.retention.is_active:
            state.retention.label_table(request_id, group.group_id, first, passed)
        nulls = [null_block] * (end - first)
        state._leaving = backwards
        blocks[first:end] = nulls
        table.num_null_blocks = end
        table.num_edits += 1
        state.block_pool.free_out_of(backwards)


def replace_shared(state: ManagerState, tables: list[BlockTable], step: Step) -> None:
    """Replace shared blocks that the step writes to with new blocks, and add the copies to make."""
    pool = state.block_pool
    for group in state._groups:
        table = tables[group.group_id]
        if not table.is_forked:
            continue
        num_blocks = group.count_table_blocks(step.num_scheduled, step.num_lookahead)
        for position in state._needs.list_shared(table, group, step.num_computed, num_blocks):
            shared = table.blocks[position]
            is_copied = position * group.block_size < step.num_computed
            pool.take_onto(state._taken, 1)
            own = state._taken[0]
            nothing: list[KVCacheBlock] = []
            leaving = [shared]
            if is_copied:
                # If `shared` itself is the target of a pending copy, copy from the source of that.
                state.copies.add(state.copies.find_source(shared), own)
            # No call may happen until the table has the block.
            state._leaving = leaving
            table.blocks[position] = own
            table.num_edits += 1
            state._taken = nothing
            pool.free_out_of(leaving)
        table.is_forked = False
