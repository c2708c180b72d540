"""`report_invalid_blocks`: blocks whose content is bad, and what is left of the requests that hold them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.mamba_group import MambaGroup


@dataclass(frozen=True)
class InvalidBlocksReport:
    """What a failed load leaves behind.

    Attributes:
        num_valid_tokens: for each request that holds a bad block, or one that may have been computed from it,
            how many of its leading tokens it can go on from in the blocks it has; the rest is computed anew.
            0: from none, so free it and admit it again; what is still good of it is found as a prefix then.
        evicted_blocks: the bad blocks, and those that were computed from them; nobody hits them any more.
    """

    num_valid_tokens: dict[str, int]
    evicted_blocks: list[KVCacheBlock]


def report_invalid_blocks(
    block_pool: BlockPoolCore,
    tables: Mapping[str, Sequence[BlockTable]],
    groups: Sequence[BlockGroup],
    block_ids: Collection[int],
) -> InvalidBlocksReport:
    """Forget the content of these blocks and of what was computed from it; say what is left.

        tokens   0 . . . | . . . . | . . . . | . . . .
        table    good    | bad     | computed from it: evicted, too
                 valid  ->|

    Args:
        tables: per request one table for each group.
        groups: the manager's.
        block_ids: what could not be loaded.

    A request of full attention goes on from the first bad block of any group. One with windows does so if
    what its next token attends to is still there; one with states, or with bad blocks of its encoder, never.

    The tables keep their blocks, since the recomputed content goes there. Their `num_cached_blocks` falls, so
    that it is cached again, and where others hold a block that will be written they count as forked.

    Raises:
        InvalidBlockError: an id is not one of this pool's, or the null block's.
        InvalidArgumentError: a request has another number of tables than there are groups. In both cases
            nothing has changed.
    Cost: O(blocks in the tables), once more for each request through which doubt spreads to another.
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
    num_valid_tokens: dict[str, int] = {}
    for request_id, num_good in _count_good_tokens(tables, groups, set(evicted)).items():
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
    evict_wrong_blocks(block_pool, [block.block_id for block in evicted])
    return InvalidBlocksReport(num_valid_tokens, list(evicted))


def evict_wrong_blocks(block_pool: BlockPoolCore, block_ids: Sequence[int]) -> None:
    """Forget the content of these blocks, which is wrong, in the pool and in the colder tiers that it has.

    Raises:
        InvalidBlockError, InvalidTypeError: not ids of this pool's blocks. Nothing has changed.
    """
    tiers = block_pool.colder_tiers
    if tiers is not None:
        listed = [block_id for block_id in block_ids if 0 <= block_id < block_pool.num_gpu_blocks]
        keys = block_pool.list_keys([block_pool.blocks[block_id] for block_id in listed])
        if keys and len(listed) == len(block_ids):
            # Before the pool: it would not know the keys if this were called again after an interrupt.
            tiers.on_content_invalidated(keys)
    block_pool.evict_blocks(block_ids)


def _count_good_tokens(
    tables: Mapping[str, Sequence[BlockTable]], groups: Sequence[BlockGroup], bad: set[KVCacheBlock]
) -> dict[str, int]:
    """For each request that holds doubtful content, the tokens before it; 0 if it is the encoder's.

    What lies behind the first doubtful token of a request may have been computed from it, and whoever else
    holds that is in doubt from there on, too, even where a window has passed the bad block itself. That may
    make more of it doubtful, until nothing changes.
    """
    good_of: dict[str, int] = {}
    # The first token in a block that is in doubt, counted from the start of the sequence.
    doubtful_from: dict[KVCacheBlock, int] = {}
    for group_tables in tables.values():
        for table, group in zip(group_tables, groups, strict=True):
            for index, block in enumerate(table.blocks):
                if block in bad:
                    doubtful_from[block] = index * group.block_size if group.is_cacheable else 0
    has_changed = True
    while has_changed:
        has_changed = False
        for request_id, group_tables in tables.items():
            found = [
                doubtful_from[block]
                for table in group_tables
                for block in table.blocks
                if block in doubtful_from
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
                        doubtful_from[block] = min(start, doubtful_from.get(block, start))
    return good_of


def _can_go_on(tables: Sequence[BlockTable], groups: Sequence[BlockGroup], num_tokens: int) -> bool:
    """Is there all that the next token attends to, and a slot for it?"""
    for table, group in zip(tables, groups, strict=True):
        if not group.is_cacheable:
            continue
        if isinstance(group, MambaGroup):
            return False
        num_skipped = group.count_skipped_tokens(num_tokens)
        if any(block.is_null for block in table.blocks[num_skipped // group.block_size :]):
            return False
    return True
