"""`MambaGroup`: one state per request, and copies of it at block ends."""

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import BlockHash, GroupId
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable


class MambaGroup(BlockGroup):
    """The state after token n is in the block of token n; all earlier entries are null. See `BlockGroup`.

    block size 4, 6 tokens computed, the next step ends after 12
    tokens  0 1 2 3 | 4 5 6 7 | 8 9 10 11
    table   null    | read    | written
    """

    def __init__(self, pool: BlockPoolCore, group_id: GroupId, block_size: int, alignment: int) -> None:
        super().__init__(pool, group_id, block_size, alignment)
        self.forgets = True
        self.is_downward_closed = False
        self.reads_before_writes = True
        self.adds_null_blocks = True

    def find_longest_hit(
        self, block_hashes: list[BlockHash], max_num_tokens: int
    ) -> tuple[list[KVCacheBlock], int]:
        """As in `BlockGroup`: the last cached state only."""
        pool = self.pool
        group_ids = [self.group_id]
        index = min(max_num_tokens // self.block_size, len(block_hashes)) - 1
        while index >= 0:
            if (index + 1) * self.block_size % self.alignment == 0:
                blocks = pool.get_cached_block(block_hashes[index], group_ids)
                if blocks is not None:
                    return [pool.null_block] * index + blocks, (index + 1) * self.block_size
            index -= 1
        return [], 0

    def count_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1)

    def count_table_blocks(
        self, num_tokens: int, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0
    ) -> int:
        # A state after speculative tokens would take the place of the state after the accepted ones.
        return -(-num_tokens // self.block_size)

    def count_new_blocks(self, num_entries: int, num_blocks: int) -> int:
        return 1 if num_blocks > num_entries else 0

    def find_first_written(self, num_computed_tokens: int, num_blocks: int) -> int:
        # The last entry, except that a state at the end of its block is only read.
        return max(num_blocks - 1, num_computed_tokens // self.block_size)

    def count_max_blocks(self, num_tokens: int, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Count the state that is read and the state that is written."""
        return min(2, self.count_table_blocks(num_tokens))

    def make_mask(self, first: int, end: int, num_tokens: int) -> list[bool] | None:
        """Select only a state at a block's end; an earlier one covers fewer tokens than the block's hash."""
        mask = [False] * (end - first)
        if end > first and end * self.block_size == num_tokens:
            mask[-1] = True
        return mask

    def pad(self, table: BlockTable, num_blocks: int, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        return [self.pool.null_block] * (num_blocks - len(table.blocks) - 1) + blocks
