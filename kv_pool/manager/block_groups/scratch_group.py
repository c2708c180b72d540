"""`CrossAttentionGroup` and `EncoderOnlyGroup`: groups whose blocks are never hit."""

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import BlockHash, GroupId
from kv_pool.manager.block_groups.block_group import BlockGroup


class CrossAttentionGroup(BlockGroup):
    """Blocks for the encoder's tokens, taken at once and kept until the request ends. See `BlockGroup`."""

    def __init__(self, pool: BlockPoolCore, group_id: GroupId, block_size: int) -> None:
        super().__init__(pool, group_id, block_size, block_size)
        self.is_cacheable = False

    def find_longest_hit(
        self, block_hashes: list[BlockHash], max_num_tokens: int
    ) -> tuple[list[KVCacheBlock], int]:
        return [], 0

    def count_table_blocks(
        self, num_tokens: int, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0
    ) -> int:
        return -(-num_encoder_tokens // self.block_size)


class EncoderOnlyGroup(CrossAttentionGroup):
    """No blocks: everything is computed in one step, and nothing is kept."""

    def count_table_blocks(
        self, num_tokens: int, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0
    ) -> int:
        return 0
