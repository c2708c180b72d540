"""Block tables in the form the manager keeps them, for tests of their readers."""

from kv_pool import KVCacheBlock
from kv_pool.manager.block_groups.block_table import BlockTable

NULL = KVCacheBlock(0, is_null=True)


def make_table(*block_ids):
    table = BlockTable()
    append(table, *block_ids)
    return table


def append(table, *block_ids):
    table.blocks.extend(KVCacheBlock(block_id) if block_id else NULL for block_id in block_ids)
    table.num_null_blocks = count_null_head(table)


def drop_head(table, num_null_blocks, one_edit=False):
    """Move the window: entries before `num_null_blocks` become the null block."""
    for at in range(table.num_null_blocks, num_null_blocks):
        table.blocks[at] = NULL
    table.num_edits += 1 if one_edit else num_null_blocks - table.num_null_blocks
    table.num_null_blocks = count_null_head(table)


def replace(table, at, block_id):
    table.blocks[at] = KVCacheBlock(block_id)
    table.num_edits += 1
    table.num_null_blocks = count_null_head(table)


def ids(table):
    return [block.block_id for block in table.blocks]


def count_null_head(table):
    return next((at for at, block in enumerate(table.blocks) if block is not NULL), len(table.blocks))
