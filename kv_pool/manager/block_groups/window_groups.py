"""`SlidingWindowGroup`, `ChunkedLocalGroup`: groups that keep the blocks which the next token attends to."""

from typing import Final

from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import GroupId
from kv_pool.manager.block_groups.block_group import BlockGroup


class SlidingWindowGroup(BlockGroup):
    """A token attends to itself and the `window - 1` tokens before it. See `BlockGroup`.

    window 4, block size 4, 9 tokens computed; the next one is token 9
    tokens  0 1 2 3 | 4 5 6 7 | 8 9
    table   null    | block   | block          token 9 attends to 6, 7, 8, 9
    """

    def __init__(
        self,
        pool: BlockPoolCore,
        group_id: GroupId,
        block_size: int,
        alignment: int,
        window: int,
        extra_retained_tokens: int = 0,
    ) -> None:
        super().__init__(pool, group_id, block_size, alignment)
        self.window: Final = window
        # The leading tokens of a window plus those before it that a request keeps nevertheless.
        self.num_kept: Final = window - 1 + extra_retained_tokens
        self.forgets = True
        self.is_downward_closed = False

    def count_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.num_kept)

    def count_hit_blocks(self, drops_hits: bool) -> int:
        """Return how many consecutive blocks a hit needs, the dropped one included."""
        return -(-(self.window - 1) // self.block_size) + drops_hits

    def count_max_blocks(self, num_tokens: int, max_in_flight_tokens: int, max_model_len: int) -> int:
        """As in `BlockGroup`; one block more, because a window may begin anywhere in a block."""
        num_blocks = self.count_table_blocks(num_tokens)
        if not max_in_flight_tokens:
            return num_blocks
        num_kept = self.num_kept + max_in_flight_tokens
        if max_model_len:
            num_kept = min(num_kept, max_model_len)
        return min(num_blocks, -(-num_kept // self.block_size) + 1)


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
