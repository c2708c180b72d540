"""`MambaGroup`: one state per request, and copies of it at block ends."""

from typing import Final

from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import GroupId
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.step import Step


class MambaGroup(BlockGroup):
    """The state after token n is in the block of token n; all earlier entries are null. See `BlockGroup`.

    block size 4, 6 tokens computed, the next step ends after 12
    tokens  0 1 2 3 | 4 5 6 7 | 8 9 10 11
    table   null    | read    | written   | speculative blocks

    Args:
        num_speculative_blocks: see `MambaSpec`.
        checkpoint_alignment: `MambaSpec.prefill_checkpoint_alignment`; 0 for None.

    Attributes:
        hit_alignment: tokens; a hit, and so a checkpoint, ends at a multiple of it.
        has_drafter: whether any group of the manager drops the last block of its hits.
        num_recomputed: tokens at the end of a prompt that the same prompt cannot hit.
        counts_most_states: see `RuleDetails`.
    """

    def __init__(
        self,
        pool: BlockPoolCore,
        group_id: GroupId,
        block_size: int,
        alignment: int,
        num_speculative_blocks: int = 0,
        checkpoint_alignment: int = 0,
    ) -> None:
        super().__init__(pool, group_id, block_size, alignment)
        self.forgets = True
        self.is_downward_closed = False
        self.reads_before_writes = True
        self.adds_null_blocks = True
        self.num_speculative_blocks: Final = num_speculative_blocks
        self.checkpoint_alignment: Final = checkpoint_alignment
        self.hit_alignment: int = alignment
        self.has_drafter: bool = False
        self.num_recomputed: int = 1
        self.counts_most_states: bool = False

    def count_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1)

    def count_table_blocks(
        self, num_tokens: int, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0
    ) -> int:
        """As in `BlockGroup`, without the speculative blocks.

        A state after lookahead tokens would take the place of the state after the accepted ones.
        """
        return -(-num_tokens // self.block_size)

    def is_quiet(self, table: BlockTable, step: Step, caches: bool) -> bool:
        if self.count_table_blocks(step.num_scheduled) + table.num_speculative > len(table.blocks):
            return False
        if table.checkpoint_position >= 0 or self.plan_checkpoint(
            table, step.num_before, step.num_scheduled, step.prefill_end
        ):
            return False
        return super().is_quiet(table, step, caches)

    def count_new_blocks(self, num_entries: int, num_blocks: int) -> int:
        return 1 if num_blocks > num_entries else 0

    def find_first_written(self, num_computed_tokens: int, num_blocks: int) -> int:
        # The last entry, except that a state at the end of its block is only read.
        return max(num_blocks - 1, num_computed_tokens // self.block_size)

    def count_max_blocks(self, num_tokens: int, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Count the state that is read, the state that is written, and those of drafts and checkpoints."""
        num_states = 3 if self.checkpoint_alignment else 2
        return min(num_states, self.count_table_blocks(num_tokens)) + self.num_speculative_blocks

    def make_mask(self, first: int, end: int, num_tokens: int) -> list[bool] | None:
        """Select only a state at a block's end; an earlier one covers fewer tokens than the block's hash."""
        mask = [False] * (end - first)
        if end > first and end * self.block_size == num_tokens:
            mask[-1] = True
        return mask

    # ---- states of a step --------------------------------------------------------------------------

    def find_checkpoint(self, num_tokens: int, unit: int) -> int:
        """Return the last multiple of `unit` tokens that a request with the same `num_tokens` can hit.

        0 if there is none. The last token is computed again; a drafter needs the whole last unit.
        """
        if self.has_drafter:
            return max(0, num_tokens // unit - 1) * unit
        return (
            max(0, num_tokens - max(self.num_recomputed, self.pool.num_hash_lookahead_tokens)) // unit * unit
        )

    def plan_checkpoint(
        self, table: BlockTable | None, num_before: int, num_tokens: int, prefill_end: int
    ) -> int:
        """Return the position of the state to save in the middle of a step, in tokens; 0 for none.

            |<- num_before ->|          |<- checkpoint: in the entry before the last one
            |<--------------- num_tokens -------------->|

        Args:
            prefill_end: the step must reach it; 0 for any step.
        """
        if not self.checkpoint_alignment or num_tokens < prefill_end:
            return 0
        unit = self.pool.hash_block_size
        position = self.find_checkpoint(num_tokens, self.hit_alignment)
        entry = self.count_table_blocks(num_tokens) - 2
        if (
            num_before % unit
            or entry <= (num_before - 1) // self.block_size
            or entry < 0
            or not num_before + unit <= position < num_tokens
            or (position - num_before) % self.checkpoint_alignment
        ):
            return 0
        if table is not None and entry < len(table.blocks) - table.num_speculative:
            return position if table.blocks[entry].is_null else 0
        return position

    def count_states(
        self,
        table: BlockTable | None,
        num_hits: int,
        num_tokens: int,
        *,
        has_copy: bool,
        has_checkpoint: bool,
    ) -> int:
        """Return the number of blocks to take for a step that ends after `num_tokens` tokens.

        Args:
            num_hits: entries of the hit that are not in the table yet.
            has_copy: a state is copied to a block of its own.
            has_checkpoint: a state is saved in the middle of the step.
        """
        num_entries = num_hits if table is None else len(table.blocks) + num_hits
        num_new = self.count_table_blocks(num_tokens) + self.num_speculative_blocks - num_entries
        if has_copy:
            num_new = max(0, num_new) + 1
        if num_new <= 0:
            return 0
        num_most = 1 + has_copy + has_checkpoint + self.num_speculative_blocks
        if table is not None:
            num_most -= table.num_speculative
        return num_most if self.counts_most_states else min(num_new, num_most)
