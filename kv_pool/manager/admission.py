"""Whether a request's blocks fit: `plan_step` counts what a step needs; `judge` says now, later or never."""

from collections.abc import Iterable
from enum import Enum

from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import RequestId
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable, GroupPlan, Step
from kv_pool.manager.manager_state import ManagerState


class AllocStatus(Enum):
    """The result of `can_allocate`, `can_swap_out` and `can_swap_in`. Source: vLLM 0.6 `AllocStatus`.

    OK: the call succeeds if nothing happens in between.
    LATER: the call would succeed if other requests released their blocks.
    NEVER: the call would fail even then; the request is too large for the pool.
    """

    OK = "ok"
    LATER = "later"
    NEVER = "never"


def judge(state: ManagerState, step: Step) -> AllocStatus:
    """Return whether `allocate_step` would succeed. Changes nothing; see `KVCacheManager.can_allocate`."""
    num_free = state.get_num_free_blocks()
    if (
        fits_sequence(state, step, num_free)
        and fits_step(state, step, num_free + count_to_forget(state, step))
        and not state.caching.is_unwritten(step.prefix_blocks)
    ):
        return AllocStatus.OK
    pins = list_lasting_pins(state, step.request_id, list_own_blocks(state, step))
    num_usable = state.block_pool.num_gpu_blocks - 1 - len(pins)
    return AllocStatus.LATER if fits_alone(state, num_usable, step) else AllocStatus.NEVER


def fits_sequence(state: ManagerState, step: Step, num_free: int) -> bool:
    """Return True if the whole sequence fits in this many free blocks, or need not fit yet."""
    if not step.num_sequence:
        return True
    num_left = step.num_left - count_surplus(state, step.tables, step.num_sequence)
    return count_full_sequence(state, step, step.num_sequence) <= num_free - num_left


def fits_step(state: ManagerState, step: Step, num_free: int) -> bool:
    """Plan the step, and return True if this many free blocks suffice for it and for what it leaves free."""
    need = plan_step(state, step)
    num_kept = step.num_left + step.num_reserved
    if num_kept:  # under vLLM, states of rejected drafts count towards it
        num_kept = max(0, num_kept - count_surplus(state, step.tables, step.num_scheduled))
    return need <= num_free - num_kept


# ---- what a step needs -----------------------------------------------------------------------------


def plan_step(state: ManagerState, step: Step) -> int:
    """Plan the step in each group, and return the number of free blocks that it needs."""
    need = 0
    step.plans = []
    for group in state._groups:
        plan = GroupPlan()
        if step.tables is not None:
            table = step.tables[group.group_id]
            if table.is_forked and not step.is_alone:
                plan.shared = list_shared(state, group, table, step)
        group.plan(step, plan)
        need += plan.need
        step.plans.append(plan)
    return need


def list_shared(state: ManagerState, group: BlockGroup, table: BlockTable, step: Step) -> list[int]:
    """Return the positions of the blocks that the step writes to and that others hold, too.

    References of pending copies are not those of requests.
    """
    if not group.is_cacheable:
        return []
    num_blocks = group.count_entries(step)
    blocks = table.blocks
    shared: list[int] = []
    for position in range(group.find_first_written(step.num_computed, num_blocks), len(blocks)):
        block = blocks[position]
        if block.ref_cnt > 2 or (block.ref_cnt == 2 and not state.copies.is_source(block)):
            shared.append(position)
    return shared


def count_full_sequence(state: ManagerState, step: Step, num_tokens: int, num_lookahead: int = 0) -> int:
    """Return the number of free blocks needed until all `num_tokens` tokens of the request have slots.

    Args:
        num_lookahead: slots after them, for speculative tokens.
    """
    num_tokens = limit_tokens(state, num_tokens)
    need = 0
    for group in state._groups:
        num_most = count_most(state, group, num_tokens + num_lookahead, step.num_encoder_tokens)
        need += group.count_sequence(step, num_tokens, num_most)
    return need


def count_max_blocks(state: ManagerState, num_tokens: int, num_encoder_tokens: int) -> int:
    """Return the most blocks that a request holds at a time until all `num_tokens` tokens have slots."""
    num_tokens = limit_tokens(state, num_tokens)
    return sum([count_most(state, group, num_tokens, num_encoder_tokens) for group in state._groups])


def count_most(state: ManagerState, group: BlockGroup, num_tokens: int, num_encoder_tokens: int) -> int:
    """Return the most blocks that a request of `num_tokens` tokens holds in one group at a time."""
    if not group.is_cacheable:
        return group.count_table_blocks(num_encoder_tokens)
    return group.count_max_blocks(num_tokens, state.max_in_flight_tokens, state.max_model_len)


def limit_tokens(state: ManagerState, num_tokens: int) -> int:
    """Limit a number of tokens to that of the longest request."""
    return min(num_tokens, state.max_model_len) if state.max_model_len else num_tokens


def count_surplus(state: ManagerState, tables: list[BlockTable] | None, num_tokens: int) -> int:
    """Return the state blocks that rejected drafts have left beyond those of `num_tokens` tokens.

    0 unless `discounts_states`: vLLM then subtracts them from the blocks to leave free.
    """
    if tables is None or not state.discounts_states:
        return 0
    return sum([group.count_surplus(tables[group.group_id], num_tokens) for group in state._groups])


# ---- what a request could have ---------------------------------------------------------------------


def count_to_forget(state: ManagerState, step: Step) -> int:
    """Count the blocks that become free if blocks which no later token attends to are released."""
    tables = step.tables
    if tables is None:
        return 0
    retention = state.retention
    num_free = 0
    for group in state._groups:
        table = tables[group.group_id]
        end = min(group.count_skipped_tokens(step.num_final) // group.block_size, len(table.blocks))
        for position in range(table.num_null_blocks, end):
            block = table.blocks[position]
            if block.ref_cnt == 1 and not (
                retention is not None and retention.will_pin(step.request_id, group.group_id, position, block)
            ):
                num_free += 1
    return num_free


def fits_alone(state: ManagerState, num_usable: int, step: Step) -> bool:
    """Return True if a pool of `num_usable` blocks would suffice if no other request held any.

    The step is then planned so, and no longer for `allocate_step`.
    Cost: O(blocks of the request).
    """
    num_passed = 0
    if step.tables is not None:
        for group, table in zip(state._groups, step.tables, strict=True):
            end = group.count_skipped_tokens(step.num_before) // group.block_size
            for position, block in enumerate(table.blocks):
                if not block.is_null:
                    num_usable -= 1
                    num_passed += position < end
    step.is_alone = True
    if step.num_sequence and count_full_sequence(state, step, step.num_sequence) > num_usable:
        return False
    return plan_step(state, step) <= num_usable + num_passed - step.num_reserved


def list_own_blocks(state: ManagerState, step: Step) -> list[KVCacheBlock]:
    """Return the blocks in the request's tables, or those of its prefix that it keeps."""
    own: list[KVCacheBlock] = []
    for group in state._groups:
        if step.tables is not None:
            own += step.tables[group.group_id].blocks
        elif step.prefix_blocks:
            num_skipped = group.count_skipped_tokens(step.num_before) if group.forgets else 0
            own += step.prefix_blocks[group.group_id][num_skipped // group.block_size :]
    return own


def list_lasting_pins(
    state: ManagerState, request_id: RequestId | None, own_blocks: Iterable[KVCacheBlock]
) -> set[KVCacheBlock]:
    """Return the blocks that pins without a deadline keep from a request, except those of its own."""
    if state.retention is None or not state.retention.num_pins:
        return set()
    return state.retention.list_lasting_pins(request_id).difference(own_blocks)
