"""`BlockGroup`: how one KV cache group uses blocks; the base class implements full attention."""

from collections.abc import Sequence
from typing import Any, Final

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import BlockHash, GroupId
from kv_pool.manager.block_groups.block_table import BlockTable, GroupPlan, Step

NO_BLOCKS: Final[Sequence[KVCacheBlock]] = ()


@mypyc_attr(allow_interpreted_subclasses=False)
class BlockGroup:
    """One KV cache group over a pool. The base class keeps every token: full attention.

    Args:
        spec: the `KVCacheSpec` of this class.
        pool: the pool that the blocks come from.
        group_id: its index among the manager's groups.
    """

    def __init__(self, spec: Any, pool: BlockPoolCore, group_id: GroupId) -> None:
        self.pool: BlockPoolCore = pool
        self.group_id: GroupId = group_id
        self.block_size: int = spec.block_size
        self.stride: int = max(1, self.block_size // pool.hash_block_size)
        self.is_cacheable: bool = spec.is_cacheable
        # Whether blocks are released while the request runs, which costs a check in each step. Then hits need
        # the last blocks only; otherwise all from the head of a sequence on.
        self.forgets: bool = False
        # Whether the content is a state after the last token, from which no request can go back.
        self.is_state: bool = False
        # Whether a step reads before it writes: then no request can hit a block that the same step writes.
        self.reads_before_writes: bool = False
        # Whether hits drop their last block, for a drafter; see `PrefixRules.eagle_groups`.
        self.drops_hits: bool = False
        # Whether its layers read later tokens as well, so that K and V of the next layers depend on them.
        self.reads_whole_sequence: bool = False

    def list_hashes(self, block_hashes: list[BlockHash]) -> list[BlockHash]:
        """Select this group's hashes from those at the pool's `hash_block_size`."""
        if self.stride == 1:
            return block_hashes
        return block_hashes[self.stride - 1 :: self.stride]

    def count_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return the number of leading tokens that no token after the computed ones attends to."""
        return 0

    def count_table_blocks(
        self, num_tokens: int, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0
    ) -> int:
        """Return the number of block table entries for this many tokens, null entries included.

        Args:
            num_lookahead_tokens: speculative tokens after them.
        """
        return -(-(num_tokens + num_lookahead_tokens) // self.block_size)

    def is_quiet(self, table: BlockTable, step: Step, caches: bool) -> bool:
        """Return True if a step changes nothing in the table: it adds, releases, copies and caches no block.

        Args:
            caches: whether full blocks are cached.
        """
        block_size = self.block_size
        num_slots = len(table.blocks) * block_size
        if table.copy_position >= 0 or step.num_scheduled + step.num_lookahead > num_slots:
            return False
        if caches and step.num_scheduled >= (table.num_cached_blocks + 1) * block_size:
            return False
        if not self.forgets:
            return True
        return self.count_skipped_tokens(step.num_final) < (table.num_null_blocks + 1) * block_size

    def plan(self, step: Step, plan: GroupPlan, is_alone: bool) -> None:
        """Plan what the step takes.

        Args:
            plan: a new one, in which only `shared` is set.
            is_alone: count all hits as free blocks.
        """
        if step.tables is not None:
            num_entries = len(step.tables[self.group_id].blocks)
            plan.need = len(plan.shared)
        else:
            num_entries = self.plan_start(step, plan, is_alone)
            # A window of 1 after the external tokens reads none of them.
            if (
                step.num_external
                and self.is_cacheable
                and self.count_skipped_tokens(step.num_before) < step.num_before
            ):
                plan.num_external = max(0, self.count_table_blocks(step.num_before) - num_entries)
                num_entries += plan.num_external
        num_blocks = self.count_table_blocks(step.num_scheduled, step.num_lookahead, step.num_encoder_tokens)
        plan.num_new = max(0, num_blocks - num_entries)
        plan.need += plan.num_external + plan.num_new

    def plan_start(self, step: Step, plan: GroupPlan, is_alone: bool) -> int:
        """Plan the entries that a new table starts with, and return their number."""
        hits = step.prefix_blocks[self.group_id]
        if self.forgets:
            plan.num_nulls = self.count_skipped_tokens(step.num_before) // self.block_size
        for position in range(plan.num_nulls, len(hits)):
            block = hits[position]
            if (is_alone or block.ref_cnt == 0) and not block.is_null:
                plan.need += 1
        if step.num_prefix % self.block_size and hits:
            plan.need += 1  # the copy of the block in which the hit ends
        return max(plan.num_nulls, len(hits))

    def arrange(self, table: BlockTable, plan: GroupPlan) -> Sequence[KVCacheBlock]:
        """Prepare a table for the blocks to append; return the entries appended so far. See `MambaGroup`."""
        return NO_BLOCKS

    def count_sequence(self, step: Step, num_tokens: int, num_most: int, is_alone: bool) -> int:
        """Count the free blocks that a request needs until all its `num_tokens` tokens have slots.

        Args:
            num_most: the result of `count_max_blocks`.
        """
        if step.tables is not None:
            return max(0, num_most - len(step.tables[self.group_id].blocks))
        plan = GroupPlan()
        num_entries = self.plan_start(step, plan, is_alone)
        return plan.need + max(0, num_most - num_entries)

    def count_surplus(self, table: BlockTable, num_tokens: int) -> int:
        """Count the blocks of rejected drafts beyond those of `num_tokens` tokens: see `MambaGroup`."""
        return 0

    def find_first_written(self, num_computed_tokens: int, num_blocks: int) -> int:
        """Return the first table entry that a step writes to if it starts after the computed tokens."""
        return num_computed_tokens // self.block_size

    def count_max_blocks(self, num_tokens: int, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens holds at any time.

        Args:
            max_in_flight_tokens: most tokens scheduled in one step; 0 for no bound.
            max_model_len: most tokens of a request; 0 for no bound.
        """
        return self.count_table_blocks(num_tokens)

    def count_kept_blocks(self, num_kept: int, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the number of blocks for these tokens and those of one step, none of which is released."""
        num_tokens = num_kept + max_in_flight_tokens
        if max_model_len:
            num_tokens = min(num_tokens, max_model_len)
        return -(-num_tokens // self.block_size)


class SlidingWindowGroup(BlockGroup):
    """A token attends to itself and the `window - 1` tokens before it. See `BlockGroup`.

    window 4, block size 4, 9 tokens computed; the next one is token 9
    tokens  0 1 2 3 | 4 5 6 7 | 8 9
    table   null    | block   | block          token 9 attends to 6, 7, 8, 9
    """

    def __init__(self, spec: Any, pool: BlockPoolCore, group_id: GroupId) -> None:
        super().__init__(spec, pool, group_id)
        self.window: Final[int] = spec.sliding_window
        # The leading tokens of a window plus those before it that a request keeps nevertheless.
        self.num_kept: Final[int] = self.window - 1 + spec.extra_retained_tokens
        self.forgets = True

    def count_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.num_kept)

    def count_hit_blocks(self, drops_hits: bool) -> int:
        """Return how many consecutive blocks a hit needs, the dropped one included."""
        return -(-(self.window - 1) // self.block_size) + drops_hits

    def count_max_blocks(self, num_tokens: int, max_in_flight_tokens: int, max_model_len: int) -> int:
        num_blocks = self.count_table_blocks(num_tokens)
        # One more, because a window may begin anywhere in a block.
        num_most = self.count_kept_blocks(self.num_kept, max_in_flight_tokens, max_model_len) + 1
        return min(num_blocks, num_most) if max_in_flight_tokens else num_blocks


class ChunkedLocalGroup(BlockGroup):
    """A token attends to the tokens before it in its own chunk. See `BlockGroup`."""

    def __init__(self, spec: Any, pool: BlockPoolCore, group_id: GroupId) -> None:
        super().__init__(spec, pool, group_id)
        self.chunk_size: Final[int] = spec.attention_chunk_size
        self.forgets = True

    def count_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.chunk_size * self.chunk_size

    def count_max_blocks(self, num_tokens: int, max_in_flight_tokens: int, max_model_len: int) -> int:
        num_blocks = self.count_table_blocks(num_tokens)
        num_most = self.count_kept_blocks(self.chunk_size, max_in_flight_tokens, max_model_len)
        return min(num_blocks, num_most) if max_in_flight_tokens else num_blocks


class CrossAttentionGroup(BlockGroup):
    """Blocks for the encoder's tokens, taken at once and kept until the request ends. See `BlockGroup`."""

    def count_table_blocks(
        self, num_tokens: int, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0
    ) -> int:
        return -(-num_encoder_tokens // self.block_size)

    def is_quiet(self, table: BlockTable, step: Step, caches: bool) -> bool:
        return True  # a step without encoder tokens


class EncoderOnlyGroup(CrossAttentionGroup):
    """No blocks: everything is computed in one step, and nothing is kept."""

    def __init__(self, spec: Any, pool: BlockPoolCore, group_id: GroupId) -> None:
        super().__init__(spec, pool, group_id)
        self.reads_whole_sequence = True

    def count_table_blocks(
        self, num_tokens: int, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0
    ) -> int:
        return 0


class StateGroup(BlockGroup):
    """A token reads the state after the token before it. See `BlockGroup`.

    Attributes:
        num_speculative_blocks: entries at the end of a table, for the states after draft tokens.
    """

    def __init__(self, spec: Any, pool: BlockPoolCore, group_id: GroupId) -> None:
        super().__init__(spec, pool, group_id)
        self.forgets = True
        self.is_state = True
        self.num_speculative_blocks: Final[int] = spec.num_speculative_blocks

    def count_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1)


class SingleStateGroup(StateGroup):
    """A state that no request can hit, in one block, and the states after draft tokens."""

    def count_table_blocks(
        self, num_tokens: int, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0
    ) -> int:
        return super().count_table_blocks(num_tokens, num_lookahead_tokens) + self.num_speculative_blocks
