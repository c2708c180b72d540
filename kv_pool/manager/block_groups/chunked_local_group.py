"""`ChunkedLocalGroup`: keeps the blocks of the chunk that contains the next token."""

from typing import Final

from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import GroupId
from kv_pool.manager.block_groups.block_group import BlockGroup


class ChunkedLocalGroup(BlockGroup):
    """A token attends to the tokens before it in its own chunk. See `BlockGroup`."""

    def __init__(
        self, pool: BlockPoolCore, group_id: GroupId, block_size: int, alignment: int, chunk_size: int
    ) -> None:
        super().__init__(pool, group_id, block_size, alignment)
        self.chunk_size: Final = chunk_size
        self.forgets = True
        self.is_downward_closed = False

    def count_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.chunk_size * self.chunk_size

    def count_max_blocks(self, num_tokens: int, max_in_flight_tokens: int, max_model_len: int) -> int:
        num_blocks = self.count_table_blocks(num_tokens)
        if not max_in_flight_tokens:
            return num_blocks
        num_kept = self.chunk_size + max_in_flight_tokens
        if max_model_len:
            num_kept = min(num_kept, max_model_len)
        return min(num_blocks, -(-num_kept // self.block_size))
