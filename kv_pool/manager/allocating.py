"""`allocate_step`: what `allocate_slots` does for a `Step`, under any manager's interface.

stop      by                                   afterwards
step      `read_step`, or `EngineManager`      the arguments are checked; nothing has changed
quiet     `is_quiet`                           most decode steps end here, with no blocks
need      `plan_step`, a `GroupPlan` each      known: hits, shared entries, blocks to take
refuse    `allocate_step`                      None; blocks that left a window are released
touch     `start_tables`                       a new request's tables have its hits
take      `extend_tables`, `replace_shared`    the tables have the blocks that the plans name
cache     `cache_step`                         full blocks of known tokens can be hit
"""

from collections.abc import Sequence
from typing import Final

from kv_pool.core.arguments import as_list
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.caching import move_keys
from kv_pool.core.evicting import evict_invalid, note_own_hash
from kv_pool.core.freeing import free_listed
from kv_pool.core.taking import take, touch_listed
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.admission import fits_sequence, fits_step
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import ALL_TOKENS, BlockTable, Step
from kv_pool.manager.block_groups.state_chains import StateChains
from kv_pool.manager.manager_state import ManagerState
from kv_pool.manager.requests.request import SchedulableRequest

_NONE: Final[list[KVCacheBlock]] = []  # never changed


def allocate_step(
    state: ManagerState, request: SchedulableRequest, step: Step
) -> tuple[Sequence[KVCacheBlock], ...] | None:
    """Give the request the blocks of its step, if they fit, and cache the full ones.

    Returns:
        For each group, the blocks for the new tokens; `state._no_blocks` itself if no table changes. None if
        the step does not fit: nothing has changed, except that blocks which left a window are released.
    """
    tables = step.tables
    if tables is not None:
        if is_quiet(state, request, tables, step):
            return state._no_blocks
        for table in tables:
            table.request = request
        if state._has_forks and step.num_computed > tables[0].num_valid_tokens:
            step.caches = False  # what it computes from invalid content
    ends: list[int] | None = None  # now, since this raises for a request without the hashes
    if state.block_pool.enable_caching and step.caches:
        ends = state.caching.find_ends(request, tables, step.num_prefix, step.num_scheduled)
    if not fits_sequence(state, step, state.get_num_free_blocks()):
        return None
    if tables is not None and state._forgets:
        free_skipped_blocks(state, step.request_id, tables, step.num_final)
    if not fits_step(state, step, state.get_num_free_blocks()):
        return None
    if state.caching.is_unwritten(step.prefix_blocks):
        return None
    pool = state.block_pool
    if state.retention is not None:
        state.retention.expire()  # the time decides which blocks are hit or taken next
    pool.is_changing = True
    num_loaded = 0
    if tables is None:
        # Touch the hits of all groups first: until then the pool may hand them out as new blocks.
        tables = start_tables(state, request, step)
        if pool.enable_caching:
            state.looked_up_tokens += request.num_tokens
            state.hit_tokens += step.num_prefix
        for listener in state.listeners:
            listener.note_started(request)
        if step.num_external:
            num_loaded = step.num_before
            for plan, table in zip(step.plans, tables):  # noqa: B905 (compiles to a loop)
                if plan.num_external:
                    table.blocks += take_after(state, table, plan.num_external)
                    table.num_hits = len(table.blocks)
    elif state._has_forks:
        replace_shared(state, tables, step)
    added = extend_tables(state, tables, step)
    if step.tables is None and step.num_encoder_tokens:
        note_encoder(state, request, tables)
    state.caching.note_step(request, tables, step)
    if ends is not None:
        cache_step(state, request, tables, ends, step.num_scheduled, 0, num_loaded)
    if step.tables is None:
        state._tables[step.request_id] = tables
    pool.is_changing = False
    return added


def is_quiet(state: ManagerState, request: SchedulableRequest, tables: list[BlockTable], step: Step) -> bool:
    """Return True if a step fits and changes none of the tables, as most decode steps."""
    if step.num_encoder_tokens or step.num_sequence:
        return False
    if state._has_forks:
        for table in tables:
            if table.is_forked or table.num_valid_tokens < ALL_TOKENS:
                return False
    num_kept = step.num_left + step.num_reserved
    if num_kept and num_kept > state.get_num_free_blocks():
        return False
    caches = step.caches and state.block_pool.enable_caching
    for group in state._groups:
        if not group.is_quiet(tables[group.group_id], step, caches):
            return False
    return not caches or not state.caching.is_end_due(request, tables, step.num_computed)


def cache_step(
    state: ManagerState,
    request: SchedulableRequest,
    tables: list[BlockTable],
    ends: list[int],
    num_scheduled: int,
    num_present: int,
    num_loaded: int,
) -> None:
    """Cache what a step computes, and release the states that it supersedes; see `PrefixCaching.cache`."""
    state.caching.cache(request, tables, ends, num_scheduled, num_present, num_loaded)
    if state.caching.chains is not None:
        release_superseded(state, state.caching.chains)


def cache_written(
    state: ManagerState, request: SchedulableRequest, tables: list[BlockTable], num_tokens: int
) -> None:
    """Cache the full blocks of the first `num_tokens` tokens, whose content is there."""
    ends = state.caching.find_ends(request, tables, 0, num_tokens)
    if ends is not None:
        state.block_pool.is_changing = True
        state.caching.cache(request, tables, ends, num_tokens, num_tokens)
        state.block_pool.is_changing = False


def start_tables(state: ManagerState, request: SchedulableRequest, step: Step) -> list[BlockTable]:
    """Return a table with the hits for each group; entries before a window are null blocks."""
    pool = state.block_pool
    tables: list[BlockTable] = []
    for group in state._groups:
        table = BlockTable()
        table.request = request
        table.junction = step.junction
        table.num_hits = 0
        tables.append(table)
        used = step.prefix_blocks[group.group_id]
        num_nulls = step.plans[group.group_id].num_nulls
        if not used and not num_nulls:
            continue
        if num_nulls:
            used = used[num_nulls:]
            table.blocks.extend([pool.null_block] * num_nulls)
            table.num_null_blocks = num_nulls
        if not isinstance(used, list):
            used = as_list("cached_prefix", used)
        touch_listed(pool, used)
        table.blocks += used
        table.num_cached_blocks = len(table.blocks)
        table.num_hits = table.num_cached_blocks
        chains = state.caching.chains
        if chains is not None and group.reads_before_writes and used:
            table.resumed = chains.note_resumed(used[-1])
        if step.num_prefix % group.block_size and used:
            table.num_cached_blocks = step.num_prefix // group.block_size
            table.copy_position = table.num_cached_blocks
    return tables


def note_encoder(state: ManagerState, request: SchedulableRequest, tables: list[BlockTable]) -> None:
    """Note on the blocks of the encoder the first hash of the decoder's tokens, which depend on them."""
    if state.block_pool.enable_caching and len(request.block_hashes) > 0:
        for group in state._groups:
            if not group.is_cacheable:
                for block in tables[group.group_id].blocks:
                    note_own_hash(block, request.block_hashes[0])


def extend_tables(
    state: ManagerState, tables: list[BlockTable], step: Step
) -> tuple[Sequence[KVCacheBlock], ...]:
    """Append new blocks until each table has slots for the step's tokens; return the appended blocks.

    The copy of a block in which a hit ends counts as appended.
    """
    added: list[Sequence[KVCacheBlock]] = []
    for group in state._groups:
        table = tables[group.group_id]
        plan = step.plans[group.group_id]
        taken = own = _NONE
        has_copy = table.copy_position >= 0
        if plan.num_new or has_copy:
            taken = take_after(state, table, plan.num_new + has_copy)
        if has_copy:
            copy = taken.pop(0)
            copy_content(state, group, table, copy, step)
            if step.tables is None:
                own = [copy]
        before = group.arrange(table, plan)
        table.blocks += taken
        if own or before:
            taken = [*own, *before, *taken]
        added.append(taken or state._no_blocks[0])
    return tuple(added)


def take_after(state: ManagerState, table: BlockTable, num_blocks: int) -> list[KVCacheBlock]:
    """Take blocks for a table; a `RunBlockPool` prefers those that follow the table's last block."""
    return take(state.block_pool, num_blocks, table.blocks[-1] if table.blocks else None)


def copy_content(
    state: ManagerState, group: BlockGroup, table: BlockTable, copy: KVCacheBlock, step: Step
) -> None:
    """Copy the cached content that the step is about to overwrite: of a hit, or of the request's own state.

    A new request, whose hit ends within a block, gets the copy. A running one stays in its block, which the
    engine knows: the copy becomes the cached one.
    """
    source = table.blocks[table.copy_position]
    # The hit may end in a block that another request of this step is still to get a copy in.
    state.copies.add(state.copies.find_source(source), copy, group.group_id)
    if step.tables is None:
        table.blocks[table.copy_position] = copy
        table.copy_position = -1
        free_listed(state.block_pool, [source])
        return
    move_keys(state.block_pool, source, copy)
    if copy.key is not None:
        state.caching.note_unwritten(copy)
    if table.tail_tokens:
        state.caching.offer_state(step.request_id, group.group_id, copy, table.tail_tokens)
    table.tail_tokens = 0
    table.copy_position = -1
    free_listed(state.block_pool, [copy])


def free_skipped_blocks(
    state: ManagerState, request_id: RequestId, tables: list[BlockTable], num_computed: int
) -> None:
    """Free the blocks that no later token attends to, last block first; null blocks replace them."""
    pool = state.block_pool
    for group in state._groups:
        if not group.forgets:
            continue
        table = tables[group.group_id]
        blocks = table.blocks
        end = min(group.count_skipped_tokens(num_computed) // group.block_size, len(blocks))
        if end <= table.num_null_blocks:
            continue
        pool.is_changing = True
        first = table.num_null_blocks
        if table.copy_position < end:
            table.copy_position = -1
        passed = blocks[first:end]
        if all(block.is_null for block in passed):
            table.num_null_blocks = end
            pool.is_changing = False
            continue  # all null: between two states
        note_uncached(group, table, first, passed)
        table.add_past(first, passed)
        blocks[first:end] = [pool.null_block] * (end - first)
        table.num_null_blocks = end
        table.num_edits += 1
        release_blocks(state, request_id, group.group_id, first, passed.copy())
        pool.is_changing = False


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


def note_uncached(group: BlockGroup, table: BlockTable, first: int, passed: list[KVCacheBlock]) -> None:
    """Note their hashes on blocks that leave a table in the step in which they would be cached.

    If one of them turns out to be bad, what other groups have computed from it is found by its hash.
    """
    if table.request is None or first + len(passed) <= table.num_cached_blocks:
        return
    hashes = table.request.block_hashes
    for position in range(max(first, table.num_cached_blocks), first + len(passed)):
        block = passed[position - first]
        number = (position + 1) * group.stride - 1
        if block.key is None and not block.is_null and number < len(hashes):
            note_own_hash(block, hashes[number])


def replace_shared(state: ManagerState, tables: list[BlockTable], step: Step) -> None:
    """Replace shared blocks that the step writes to with new blocks, and add the copies to make."""
    pool = state.block_pool
    num_computed: int = step.num_computed
    for group in state._groups:
        table = tables[group.group_id]
        if num_computed <= table.num_valid_tokens < ALL_TOKENS:
            table.num_valid_tokens = ALL_TOKENS  # it is recomputed from there
            table.num_hits = min(table.num_hits, num_computed // group.block_size)
        if not table.is_forked:
            continue
        for position in step.plans[group.group_id].shared:
            shared = table.blocks[position]
            is_copied = position * group.block_size < num_computed
            [own] = take(pool, 1)
            if is_copied:
                # If `shared` itself is the target of a pending copy, copy from the source of that.
                source = state.copies.find_source(shared)
                state.copies.add(source, own)
                table.add_past(position, [source])
                if table.request is not None:
                    for block in table.list_past(position):
                        start = position * group.block_size
                        pool.origins.note_continued(block, start, table.request.block_hashes)
            table.blocks[position] = own
            table.num_edits += 1
            if position == table.copy_position:  # the other request has the cached state
                table.copy_position = -1
                table.tail_tokens = 0
            free_listed(pool, [shared])
        for block in table.blocks[max(table.num_cached_blocks, num_computed // group.block_size) :]:
            if block.num_key_tokens > num_computed:
                # Cached by a request that held it, too, and has left; this one was truncated within it.
                evict_invalid(pool, [block])
        table.is_forked = False


def release_superseded(state: ManagerState, chains: StateChains) -> None:
    """Evict the superseded states; their blocks are reused first. Blocks in use or retained stay cached."""
    pool = state.block_pool
    superseded = chains.superseded
    while len(superseded) > 0:
        old = superseded[-1]
        block = old.block
        is_retained = state.retention is not None and block.retention_id != 0
        if old.is_cached and block.ref_cnt == 0 and not is_retained:
            # With a reference the block leaves the queue; without content it returns to the front.
            touch_listed(pool, [block])
            evict_invalid(pool, [block])
            free_listed(pool, [block])
        superseded.pop()
