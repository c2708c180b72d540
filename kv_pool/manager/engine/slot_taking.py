"""`take_slots`: the slots of one request in one step, with the arguments and rules of vLLM's scheduler."""

from collections.abc import Sequence
from typing import Any

from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import RequestId
from kv_pool.manager.allocating import extend_tables, free_skipped_blocks, start_tables
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.recovery import recover
from kv_pool.manager.step import Step


def is_quiet(
    manager: KVCacheManager,
    tables: list[BlockTable],
    num_scheduled: int,
    num_lookahead: int,
    num_processed: int,
) -> bool:
    """Return True if a step changes no table: no block to add, to release or to cache. Most decode steps.

    Args:
        num_scheduled: tokens of the request after the step, those of its computed prefix included.
        num_processed: tokens whose steps have finished; blocks before their window are released.
    """
    if manager._has_forks:
        return False
    caches = manager.block_pool.enable_caching
    for group in manager._groups:
        table = tables[group.group_id]
        if group.count_table_blocks(num_scheduled, num_lookahead, 0) > len(table.blocks):
            return False
        if group.is_cacheable:
            block_size = group.block_size
            if caches and num_scheduled >= (table.num_cached_blocks + 1) * block_size:
                return False
            if group.forgets:
                num_skipped = group.count_skipped_tokens(num_processed)
                if num_skipped >= (table.num_null_blocks + 1) * block_size:
                    return False
    return True


def take_slots(
    manager: KVCacheManager,
    request: Any,
    step: Step,
    num_processed: int,
    num_left: int,
    num_reserved: int,
    sequence_must_fit: bool,
    delays_caching: bool,
) -> tuple[Sequence[KVCacheBlock], ...] | None:
    """Make room for the step, as `KVCacheManager.allocate_slots`; None if it does not fit.

    Args:
        num_left: blocks to leave free for requests that are running.
        num_reserved: further blocks to leave free, except if the whole sequence must fit.
        sequence_must_fit: return None unless all tokens of the request fit.
        delays_caching: do not cache blocks whose content is still in transit.
    """
    tables = step.tables
    is_new = tables is None
    request_id = step.request_id
    has_external = step.num_before > step.num_computed + step.num_prefix
    num_free = manager.get_num_free_blocks()
    if sequence_must_fit:
        num_sequence: int = request.num_tokens
        if manager._needs.count_full_sequence(step, num_sequence) > num_free - num_left:
            return None
    if tables is not None and manager._forgets:
        release_passed(manager, request_id, tables, num_processed)
        num_free = manager.get_num_free_blocks()
    need = manager._needs.count(step)
    if need > num_free - num_left - num_reserved:
        return None
    if len(manager._caching.unwritten) > 0 and manager._caching.is_unwritten(step.prefix_blocks):
        return None
    if manager.retention is not None:
        manager.retention.expire()  # the time decides which blocks are hit or taken next
    if tables is None:
        tables = []
    for table in tables:
        table.num_settled = len(table.blocks)
        table.num_settled_cached = table.num_cached_blocks
    try:
        if is_new:
            # Touch the hits of all groups first: until then the pool may hand them out as new blocks.
            start_tables(manager, tables, step)
            if manager.retention is not None and manager.retention.is_active:
                manager.retention.note_admitted(request)
            if has_external:
                extend_tables(manager, tables, step.num_before, 0, 0)
        added = manager._no_blocks
        if need or has_external:
            added = extend_tables(
                manager, tables, step.num_scheduled, step.num_lookahead, step.num_encoder_tokens
            )
        if not delays_caching and manager.block_pool.enable_caching:
            cache_known(manager, request, tables, step.num_scheduled, is_written=False)
        if is_new:
            manager._tables[request_id] = tables
    except BaseException:
        manager._is_leaving = False
        manager._unsettled = tables
        recover(manager)
        raise
    return added


def cache_known(
    manager: KVCacheManager, request: Any, tables: list[BlockTable], num_tokens: int, *, is_written: bool
) -> None:
    """Cache the full blocks of the first `num_tokens` tokens, as far as the request knows their hashes."""
    num_known: int = request.num_tokens
    num_hashed = len(request.block_hashes) * manager.block_pool.hash_block_size
    num_cacheable = min(num_tokens, num_known, num_hashed)
    ends = manager._caching.count_full(request, tables, 0, num_cacheable)
    if ends is not None:
        manager._caching.cache(request, tables, ends, num_tokens, is_written)


def release_passed(
    manager: KVCacheManager, request_id: RequestId, tables: list[BlockTable], num_processed: int
) -> None:
    """Release the blocks that no token after the processed ones attends to."""
    try:
        free_skipped_blocks(manager, request_id, tables, num_processed)
    except BaseException:
        recover(manager)
        raise
