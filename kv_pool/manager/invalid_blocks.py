"""`report_invalid_blocks`: evict blocks with bad content, and report what is left of their requests."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import BlockId, RequestId
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.mamba_group import MambaGroup


@dataclass(frozen=True)
class InvalidBlocksReport:
    """The result of a failed load.

    Attributes:
        num_valid_tokens: for each request that holds a bad block, or a block that may have been computed from
            one, the number of leading tokens from which it can continue in its blocks; the rest is
            recomputed. 0: none; free the request and admit it again, and its valid blocks are found as a
            prefix.
        evicted_blocks: the bad blocks, and those computed from them; they can no longer be hit.
    """

    num_valid_tokens: dict[RequestId, int]
    evicted_blocks: list[KVCacheBlock]


def report_invalid_blocks(
    block_pool: BlockPoolCore,
    tables: Mapping[RequestId, Sequence[BlockTable]],
    groups: Sequence[BlockGroup],
    block_ids: Collection[BlockId],
) -> InvalidBlocksReport:
    """Evict these blocks and all that were computed from them; report what is left of each request.

        tokens   0 . . . | . . . . | . . . . | . . . .
        table    good    | bad     | computed from it: evicted, too
                 valid  ->|

    Args:
        tables: for each request, one table per group.
        groups: the manager's groups.
        block_ids: the blocks that failed to load.

    A request with full attention continues from the first bad block of any group. A request with windows
    does so if all that its next token attends to is still there; a request with states, or with bad blocks
    of its encoder, never does.

    The tables keep their blocks, since the recomputed content goes there. Their `num_cached_blocks`
    decreases, so that it is cached again. A table counts as forked if others hold a block to be written.

    Raises:
        InvalidBlockError: an id is not one of this pool's, or the null block's.
        InvalidArgumentError: the number of a request's tables differs from that of the groups. In both cases
            nothing has changed.
    Cost: O(blocks in the tables), once more for each request through which bad content reaches another.
    """
    for block_id in block_ids:
        if not 0 < block_id < block_pool.num_gpu_blocks:
            raise InvalidBlockError(
                f"block {block_id} was reported as invalid; this pool has blocks "
                f"1..{block_pool.num_gpu_blocks - 1}"
            )
    for request_id, group_tables in tables.items():
        if len(group_tables) != len(groups):
            raise InvalidArgumentError(
                f"request {request_id!r} has {len(group_tables)} tables; there are {len(groups)} groups"
            )
    evicted = dict.fromkeys(block_pool.blocks[block_id] for block_id in block_ids)
    num_valid_tokens: dict[RequestId, int] = {}
    for request_id, num_good in _count_valid_tokens(tables, groups, set(evicted)).items():
        group_tables = tables[request_id]
        num_valid_tokens[request_id] = num_good if _can_go_on(group_tables, groups, num_good) else 0
        for table, group in zip(group_tables, groups, strict=True):
            num_good_blocks = num_good // group.block_size
            for block in table.blocks[num_good_blocks:]:
                if not block.is_null:
                    evicted[block] = None
                    if block.ref_cnt > 1:
                        table.is_forked = True
            table.num_cached_blocks = min(table.num_cached_blocks, num_good_blocks)
    evict_invalid_blocks(block_pool, [block.block_id for block in evicted])
    return InvalidBlocksReport(num_valid_tokens, list(evicted))


def evict_invalid_blocks(block_pool: BlockPoolCore, block_ids: Sequence[BlockId]) -> None:
    """Evict these blocks, whose content is wrong, from the pool and from its lower tiers.

    Raises:
        InvalidBlockError, InvalidTypeError: not ids of this pool's blocks. Nothing has changed.
    """
    tiers = block_pool.lower_tiers
    if tiers is not None:
        listed = [block_id for block_id in block_ids if 0 <= block_id < block_pool.num_gpu_blocks]
        keys = block_pool.list_keys([block_pool.blocks[block_id] for block_id in listed])
        if keys and len(listed) == len(block_ids):
            # Before the pool: if this is called again after an interrupt, the pool no longer knows the keys.
            tiers.on_content_invalidated(keys)
    block_pool.evict_blocks(block_ids)


def _count_valid_tokens(
    tables: Mapping[RequestId, Sequence[BlockTable]], groups: Sequence[BlockGroup], bad: set[KVCacheBlock]
) -> dict[RequestId, int]:
    """For each request that holds suspect content, count the tokens before it; 0 if it is the encoder's.

    The content after the first suspect token of a request may have been computed from it. A request that
    shares such content is suspect from there on, too, even if its window has passed the bad block itself.
    That may make more of its content suspect, so repeat until nothing changes.
    """
    good_of: dict[RequestId, int] = {}
    # The first suspect token in a block, counted from the start of the sequence.
    suspect_from: dict[KVCacheBlock, int] = {}
    for group_tables in tables.values():
        for table, group in zip(group_tables, groups, strict=True):
            for index, block in enumerate(table.blocks):
                if block in bad:
                    suspect_from[block] = index * group.block_size if group.is_cacheable else 0
    has_changed = True
    while has_changed:
        has_changed = False
        for request_id, group_tables in tables.items():
            found = [
                suspect_from[block]
                for table in group_tables
                for block in table.blocks
                if block in suspect_from
            ]
            if not found or good_of.get(request_id) == min(found):
                continue
            num_good = good_of[request_id] = min(found)
            has_changed = True
            for table, group in zip(group_tables, groups, strict=True):
                if not group.is_cacheable:
                    continue
                first = num_good // group.block_size
                for index, block in enumerate(table.blocks[first:], first):
                    if not block.is_null:
                        start = max(num_good, index * group.block_size)
                        suspect_from[block] = min(start, suspect_from.get(block, start))
    return good_of


def _can_go_on(tables: Sequence[BlockTable], groups: Sequence[BlockGroup], num_tokens: int) -> bool:
    """Return True if all that the next token attends to is there, and a slot for it."""
    for table, group in zip(tables, groups, strict=True):
        if not group.is_cacheable:
            continue
        if isinstance(group, MambaGroup):
            return False
        num_skipped = group.count_skipped_tokens(num_tokens)
        if any(block.is_null for block in table.blocks[num_skipped // group.block_size :]):
            return False
    return True
