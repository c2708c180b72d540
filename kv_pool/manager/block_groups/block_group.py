"""`BlockGroup`: how one KV cache group uses blocks; as it stands, full attention."""

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import BlockHash
from kv_pool.manager.block_groups.block_table import BlockTable


@mypyc_attr(allow_interpreted_subclasses=False)
class BlockGroup:
    """One KV cache group over a pool. This one keeps every token: full attention.

    Args:
        pool: where the blocks come from.
        group_id: its place among the manager's groups.
        block_size: tokens per block.
        alignment: hits are a multiple of so many tokens, which all groups can resume at.
    """

    def __init__(self, pool: BlockPoolCore, group_id: int, block_size: int, alignment: int) -> None:
        self.pool: BlockPoolCore = pool
        self.group_id: int = group_id
        self.block_size: int = block_size
        self.alignment: int = alignment
        self.stride: int = max(1, block_size // pool.hash_block_size)
        self.is_cacheable: bool = True
        # Whether blocks are given up while the request runs, which costs a look at each step.
        self.forgets: bool = False
        # Whether what is kept is found from the head of a sequence on, without holes.
        self.is_downward_closed: bool = True
        # Whether a step reads what is there before it writes: nobody can hit what this very step writes.
        self.reads_before_writes: bool = False
        # Whether a table gets null blocks before the blocks that are taken for it; see `pad`.
        self.adds_null_blocks: bool = False

    def list_hashes(self, block_hashes: list[BlockHash]) -> list[BlockHash]:
        """The hashes at this group's block size, of those at the pool's `hash_block_size`."""
        if self.stride == 1:
            return block_hashes
        return block_hashes[self.stride - 1 :: self.stride]

    def find_longest_hit(
        self, block_hashes: list[BlockHash], max_num_tokens: int
    ) -> tuple[list[KVCacheBlock], int]:
        """The longest prefix of at most `max_num_tokens` tokens that this group could go on from.

        Args:
            block_hashes: at this group's block size.
        Returns:
            The blocks of the prefix, head first, the null block where none is needed; and its tokens, a
            multiple of the alignment. Only looks.
        """
        found = self.pool.find_cached_prefix(block_hashes, max_num_tokens // self.block_size, self.group_id)
        num_tokens = len(found) * self.block_size
        if self.alignment != self.block_size:
            num_tokens -= num_tokens % self.alignment
            del found[num_tokens // self.block_size :]
        return found, num_tokens

    def count_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens from the head that no token after the computed ones attends to."""
        return 0

    def count_table_blocks(
        self, num_tokens: int, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0
    ) -> int:
        """Entries of the block table of a request with so many tokens, null ones included.

        Args:
            num_lookahead_tokens: guessed tokens after them.
        """
        return -(-(num_tokens + num_lookahead_tokens) // self.block_size)

    def count_new_blocks(self, num_entries: int, num_blocks: int) -> int:
        """Blocks to take for a table that has `num_entries` and shall have `num_blocks`."""
        return max(0, num_blocks - num_entries)

    def find_first_written(self, num_computed_tokens: int, num_blocks: int) -> int:
        """The first entry that a step writes to, which begins after the computed tokens."""
        return num_computed_tokens // self.block_size

    def count_most_blocks(self, num_tokens: int, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Blocks that a request of so many tokens holds at most at any time.

        Args:
            max_in_flight_tokens: scheduled in one step at most; 0 for no bound.
            max_model_len: tokens of the longest request; 0 for no bound.
        """
        return self.count_table_blocks(num_tokens)

    def make_mask(self, first: int, end: int, num_tokens: int) -> list[bool] | None:
        """Which of the blocks `[first, end)` are worth caching after a step that ends at `num_tokens` tokens;
        None: all."""
        return None

    def pad(self, table: BlockTable, num_blocks: int, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """The entries to append so that the table has `num_blocks`: blocks that were taken, and null blocks.

        For groups that have `adds_null_blocks`; the others append what was taken.
        """
        return blocks
