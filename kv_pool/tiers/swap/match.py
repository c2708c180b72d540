"""`match_tables`: find which of a request's blocks the other side has, and which must be copied."""

from collections.abc import Sequence
from typing import NamedTuple

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import BlockHashWithGroupId
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.requests.request import SchedulableRequest


class Match(NamedTuple):
    """A request's tables, matched against the cached blocks of the other side.

    Attributes:
        rows: for each group and table entry, the block on the other side with the same prefix; the null block
            if the entry needs none; None for a block to take and to copy into.
        shared: the blocks found.
        num_new: blocks to take.
    """

    rows: list[list[KVCacheBlock | None]]
    shared: list[KVCacheBlock]
    num_new: int


def find_key(
    request: SchedulableRequest, group: BlockGroup, table: BlockTable, position: int, num_computed_tokens: int
) -> BlockHashWithGroupId | None:
    """Return the key under which this block is cached; None if it is not cached, or not computed in full.

    A block that carries another key than the request's own, or none (it was evicted as invalid), is not a
    prefix of any request: its content moves with the request and cannot be hit.
    """
    block = table.blocks[position]
    if block.is_null or block.block_hash is None or not group.is_cacheable:
        return None
    if (position + 1) * group.block_size > num_computed_tokens:
        return None
    place = (position + 1) * group.stride - 1
    if place >= len(request.block_hashes):
        return None
    key = make_block_hash_with_group_id(request.block_hashes[place], group.group_id)
    return key if block.block_hash == key else None


def match_tables(
    request: SchedulableRequest,
    groups: Sequence[BlockGroup],
    tables: Sequence[BlockTable],
    target: BlockPoolCore,
) -> Match:
    """Look up every block of the tables in the target pool. Changes nothing. O(blocks)."""
    num_computed_tokens = request.num_computed_tokens
    rows: list[list[KVCacheBlock | None]] = []
    shared: list[KVCacheBlock] = []
    num_new = 0
    for group, table in zip(groups, tables, strict=True):
        first = count_skipped_blocks(group, table, num_computed_tokens)
        row: list[KVCacheBlock | None] = [target.null_block] * len(table.blocks)
        for position in range(first, len(table.blocks)):
            if table.blocks[position].is_null:
                continue
            block = None
            key = find_key(request, group, table, position, num_computed_tokens)
            if key is not None:
                block = target.cached_block_hash_to_block.get_one_block(key)
            row[position] = block
            if block is None:
                num_new += 1
            else:
                shared.append(block)
        rows.append(row)
    return Match(rows, shared, num_new)


def count_skipped_blocks(group: BlockGroup, table: BlockTable, num_computed_tokens: int) -> int:
    """Count the leading entries that no later token needs; they become null blocks on the other side."""
    if not group.forgets:
        return table.num_null_blocks
    num_skipped = group.count_skipped_tokens(num_computed_tokens) // group.block_size
    return max(table.num_null_blocks, min(num_skipped, len(table.blocks)))
