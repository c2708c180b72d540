"""`CrossAttentionGroup`, `EncoderOnlyGroup`, `SingleStateGroup`: groups whose blocks are never hit."""

from typing import Final

from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import GroupId
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.step import Step


class CrossAttentionGroup(BlockGroup):
    """Blocks for the encoder's tokens, taken at once and kept until the request ends. See `BlockGroup`."""

    def __init__(self, pool: BlockPoolCore, group_id: GroupId, block_size: int) -> None:
        super().__init__(pool, group_id, block_size, block_size)
        self.is_cacheable = False

    def count_table_blocks(
        self, num_tokens: int, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0
    ) -> int:
        return -(-num_encoder_tokens // self.block_size)

    def is_quiet(self, table: BlockTable, step: Step, caches: bool) -> bool:
        return True  # a step without encoder tokens


class EncoderOnlyGroup(CrossAttentionGroup):
    """No blocks: everything is computed in one step, and nothing is kept."""

    def __init__(self, pool: BlockPoolCore, group_id: GroupId, block_size: int) -> None:
        super().__init__(pool, group_id, block_size)
        self.reads_whole_sequence = True

    def count_table_blocks(
        self, num_tokens: int, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0
    ) -> int:
        return 0


class SingleStateGroup(BlockGroup):
    """A state that no request can hit, in one block, and the states after draft tokens. See `BlockGroup`.

    Args:
        num_speculative_blocks: see `MambaSpec`.
    """

    def __init__(
        self, pool: BlockPoolCore, group_id: GroupId, block_size: int, num_speculative_blocks: int
    ) -> None:
        super().__init__(pool, group_id, block_size, block_size)
        self.forgets = True
        self.is_downward_closed = False
        self.num_speculative_blocks: Final = num_speculative_blocks

    def count_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1)

    def count_table_blocks(
        self, num_tokens: int, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0
    ) -> int:
        num_blocks = -(-(num_tokens + num_lookahead_tokens) // self.block_size)
        return num_blocks + self.num_speculative_blocks
