"""`take_slots`: the slots of one request in one step, with the arguments and rules of vLLM's scheduler."""

from collections.abc import Sequence
from typing import Any

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_checks import refuse_interrupted
from kv_pool.ids import BlockHash
from kv_pool.manager.allocating import allocate, free_skipped_blocks
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.mamba_group import MambaGroup
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.step import Step


def take_slots(
    manager: KVCacheManager,
    request: Any,
    step: Step,
    junction: int,
    num_processed: int,
    num_left: int,
    num_reserved: int,
    sequence_must_fit: bool,
    delays_caching: bool,
) -> tuple[Sequence[KVCacheBlock], ...] | None:
    """Make room for the step, as `KVCacheManager.allocate_slots`; None if it does not fit.

    Args:
        junction: see `CachedPrefix`.
        num_processed: tokens whose steps have finished; blocks before their window are released.
        num_left: blocks to leave free for requests that are running.
        num_reserved: further blocks to leave free, except if the whole sequence must fit.
        sequence_must_fit: return None unless all tokens of the request fit.
        delays_caching: do not cache blocks whose content is still in transit.
    """
    if manager.block_pool.is_changing:
        refuse_interrupted()
    tables = step.tables
    num_free = manager.get_num_free_blocks()
    if sequence_must_fit:
        num_sequence: int = request.num_tokens
        num_most = manager._needs.count_full_sequence(step, num_sequence)
        if num_most > num_free - num_left + count_surplus(manager._groups, tables, num_sequence):
            return None
    if tables is not None and manager._forgets:
        free_skipped_blocks(manager, step.request_id, tables, num_processed)
        num_free = manager.get_num_free_blocks()
    need = manager._needs.count(step)
    num_usable = num_free - num_left - num_reserved
    if need > num_usable and (
        need > num_free or need > num_usable + count_surplus(manager._groups, tables, step.num_scheduled)
    ):
        return None
    if len(manager._caching.unwritten) > 0 and manager._caching.is_unwritten(step.prefix_blocks):
        return None
    full: list[int] | None = None
    if manager.block_pool.enable_caching and not delays_caching:
        full = count_limits(manager, request, tables, step.num_scheduled)
    return allocate(manager, request, step, junction, full, need)


def count_surplus(groups: list[BlockGroup], tables: list[BlockTable] | None, num_tokens: int) -> int:
    """Return the state blocks that rejected drafts have left beyond those of `num_tokens` tokens.

    vLLM subtracts them from what the other groups need, and from the blocks to leave free.
    """
    if tables is None:
        return 0
    num_surplus = 0
    for group in groups:
        if isinstance(group, MambaGroup):
            table = tables[group.group_id]
            num_blocks = group.count_table_blocks(num_tokens) + group.num_speculative_blocks
            if table.copy_position < 0:
                num_surplus += max(0, len(table.blocks) - num_blocks)
    return num_surplus


def count_limits(
    manager: KVCacheManager, request: Any, tables: list[BlockTable] | None, num_tokens: int
) -> list[int] | None:
    """Return the tokens to cache in each group, of the first `num_tokens`; None if there is nothing to do.

    A request may lack hashes, unlike one of `KVCacheManager`: vLLM caches the blocks that have one.
    """
    rules = manager._rules
    assert rules is not None
    num_known: int = request.num_tokens
    return rules.caching.count_limits(request, tables, min(num_tokens, num_known))


def cache_written(manager: KVCacheManager, request: Any, tables: list[BlockTable], num_tokens: int) -> None:
    """Cache the full blocks of the first `num_tokens` tokens, whose content is there."""
    limits = count_limits(manager, request, tables, num_tokens)
    if limits is not None:
        manager.block_pool.is_changing = True
        manager._caching.cache(request, tables, limits, num_tokens, is_written=True)
        manager.block_pool.is_changing = False


def list_hashes(request: Any) -> list[BlockHash]:
    """Return the block hashes of an engine's request as a list."""
    hashes: Any = request.block_hashes
    return hashes if isinstance(hashes, list) else list(hashes)


def is_quiet(
    groups: list[BlockGroup],
    tables: list[BlockTable],
    caches: bool,
    num_scheduled: int,
    num_lookahead: int,
    num_processed: int,
) -> bool:
    """Return True if a step after the prompt changes no table: nothing to add, to release or to cache.

    Args:
        caches: whether full blocks are cached.
        num_scheduled: tokens of the request after the step.
        num_processed: as for `take_slots`.
    """
    for group in groups:
        table = tables[group.group_id]
        block_size = group.block_size
        if group.is_downward_closed and group.is_cacheable:  # without a division and a call
            if num_scheduled + num_lookahead > len(table.blocks) * block_size:
                return False
        else:
            num_blocks = group.count_table_blocks(num_scheduled, num_lookahead, 0)
            if num_blocks + table.num_speculative > len(table.blocks):
                return False
        if table.copy_position >= 0 or table.checkpoint_position >= 0:
            return False
        if group.is_cacheable:
            if caches and num_scheduled >= (table.num_cached_blocks + 1) * block_size:
                return False
            if group.forgets:
                num_skipped = group.count_skipped_tokens(num_processed)
                if num_skipped >= (table.num_null_blocks + 1) * block_size:
                    return False
    return True
