"""`MambaGroup`: one state per request, and copies of it at block ends."""

from collections.abc import Sequence
from typing import Any, Final

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.caching import cache_partial
from kv_pool.core.evicting import evict_invalid
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import BlockHash, BlockHashWithGroupId, GroupId
from kv_pool.manager.block_groups.block_group import NO_BLOCKS, EqualGroups, StateGroup
from kv_pool.manager.block_groups.block_table import BlockTable, GroupPlan, Step
from kv_pool.manager.requests.request import SchedulableRequest


class MambaGroup(StateGroup):
    """The state after token n is in the block of token n; all earlier entries are null. See `BlockGroup`.

    block size 4, 6 tokens computed, the next step ends after 12
    tokens  0 1 2 3 | 4 5 6 7 | 8 9 10 11
    table   null    | read    | written   | speculative blocks

    Attributes:
        checkpoint_alignment: `MambaSpec.prefill_checkpoint_alignment`; 0 for None.
        hit_alignment: tokens; a hit, and so a checkpoint, ends at a multiple of it.
        has_drafter: whether a group of the manager drops the last block of its hits.
        num_recomputed: tokens at the end of a prompt that the same prompt cannot hit.
        counts_most_states: see `RuleDetails`.
        rules: the manager's `PrefixRules`; None for none. With rules the whole sequence is counted as the
            states of one step.
        caches_junctions: whether states at junctions within a block are cached.
    """

    def __init__(self, spec: Any, pool: BlockPoolCore, group_id: GroupId) -> None:
        super().__init__(spec, pool, group_id)
        self.reads_before_writes = True
        self.checkpoint_alignment: Final[int] = spec.prefill_checkpoint_alignment or 0
        self.hit_alignment: int = self.block_size
        self.has_drafter: bool = False
        self.num_recomputed: int = 1
        self.counts_most_states: bool = False
        self.rules: Any = None
        self.caches_junctions: bool = False

    def follow(self, rules: Any, has_drafter: bool, hit_alignment: int, caches_junctions: bool) -> None:
        """Plan and cache states by the manager's rules. Called once, when `drops_hits` is known."""
        details = rules.details
        self.rules = rules
        self.has_drafter = self.drops_hits if details.own_drafter_only else has_drafter
        self.hit_alignment = hit_alignment
        self.num_recomputed = 0 if details.caches_whole_prompts else 1
        self.counts_most_states = details.counts_most_states
        self.caches_junctions = caches_junctions

    def count_entries(self, step: Step) -> int:
        """As in `BlockGroup`, without the speculative blocks.

        A state after lookahead tokens would take the place of the state after the accepted ones.
        """
        return self.count_table_blocks(step.num_scheduled)

    def find(
        self, together: EqualGroups, hashes: list[BlockHash], max_num_tokens: int, drops: bool
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Find the last cached state."""
        pool = self.pool
        own = hashes if together.is_partial else self.list_hashes(hashes)
        step = together.unit if together.is_partial else self.block_size
        for index in range(min(max_num_tokens // step, len(own)) - 1, -1, -1):
            num_tokens = (index + 1) * step
            if num_tokens % together.alignment:
                continue
            blocks = pool.get_cached_block(own[index], together.group_ids)
            if blocks is not None:
                nulls = [pool.null_block] * ((num_tokens - 1) // self.block_size)
                return [[*nulls, block] for block in blocks], num_tokens
        return [[] for _ in together.group_ids], 0

    def is_quiet(self, table: BlockTable, step: Step, caches: bool) -> bool:
        if self.count_table_blocks(step.num_scheduled) + table.num_speculative > len(table.blocks):
            return False
        if self.checkpoint_alignment and (
            table.checkpoint_position >= 0 or step.num_scheduled - step.num_final > self.pool.hash_block_size
        ):
            return False  # the step may save a state on its way
        return super().is_quiet(table, step, caches)

    def find_first_written(self, num_computed_tokens: int, num_blocks: int) -> int:
        # The last entry, except that a state at the end of its block is only read.
        return max(num_blocks - 1, num_computed_tokens // self.block_size)

    def count_max_blocks(self, num_tokens: int, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Count the state that is read, the state that is written, and those of drafts and checkpoints."""
        num_states = 3 if self.checkpoint_alignment else 2
        return min(num_states, self.count_table_blocks(num_tokens)) + self.num_speculative_blocks

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

    def plan(self, step: Step, plan: GroupPlan) -> None:
        self._plan_until(step, plan, step.num_scheduled)

    def count_sequence(self, step: Step, num_tokens: int, num_most: int) -> int:
        if self.rules is None:
            return super().count_sequence(step, num_tokens, num_most)
        plan = GroupPlan()
        self._plan_until(step, plan, num_tokens, is_sequence=True)
        return plan.need

    def _plan_until(self, step: Step, plan: GroupPlan, num_tokens: int, is_sequence: bool = False) -> None:
        """Plan the states of a step that ends after `num_tokens` tokens.

            before   null  read  draft  draft
            after    null  read  null   null   null  written  draft  draft      3 blocks further, 2 drafts
                                 |<- moved to the end and used again   ->|
        Args:
            is_sequence: as vLLM, count the whole sequence like a step without external tokens.
        """
        table: BlockTable | None = None
        has_copy = False
        num_drafts = 0
        if step.tables is not None:
            table = step.tables[self.group_id]
            num_entries = len(table.blocks)
            num_drafts = table.num_speculative
            # A shared state stays with the other request.
            has_copy = table.copy_position >= 0 and table.copy_position not in plan.shared
            plan.need = len(plan.shared) + has_copy
        else:
            num_entries = self.plan_start(step, plan)
            hits = step.prefix_blocks[self.group_id]
            has_copy = len(hits) > 0 and step.num_prefix % self.block_size > 0
            if step.num_external:
                if self.rules is not None and hits and hits[-1].ref_cnt == 0 and not hits[-1].is_null:
                    plan.need += 1  # vLLM counts the hit, too
                if not is_sequence:
                    # The state after the external tokens has a block of its own.
                    plan.num_external = self.count_table_blocks(step.num_before) - num_entries
                    plan.need += not self.counts_most_states
                    num_entries += plan.num_external
        written = self.count_table_blocks(num_tokens) - 1
        plan.checkpoint = self.plan_checkpoint(table, step.num_before, num_tokens, step.prefill_end)
        num_saved = 1 if plan.checkpoint else 0
        plan.null_end = written - num_saved
        num_moved = 0
        if table is not None:
            for entry in range(num_entries - num_drafts, min(num_entries, plan.null_end)):
                num_moved += not table.blocks[entry].is_null
        num_missing = written + 1 - max(num_entries, plan.null_end) - num_moved
        plan.num_new = max(0, num_missing + self.num_speculative_blocks)
        if self.counts_most_states and (plan.num_new or has_copy or step.num_external):
            plan.need += 1 + num_saved + self.num_speculative_blocks - num_drafts
        else:
            plan.need += plan.num_new

    def arrange(self, table: BlockTable, plan: GroupPlan) -> Sequence[KVCacheBlock]:
        """Append null entries, and move the blocks of drafts behind them. Return the appended entries."""
        if self.checkpoint_alignment:
            table.checkpoint_tokens = plan.checkpoint
            table.checkpoint_position = plan.null_end if plan.checkpoint else -1
        num_before = len(table.blocks)
        num_drafts = table.num_speculative
        table.num_speculative = self.num_speculative_blocks
        if plan.null_end <= num_before - num_drafts:
            return NO_BLOCKS  # nothing to move
        null = self.pool.null_block
        blocks = table.blocks + [null] * (plan.null_end - num_before)
        for entry in range(num_before - num_drafts, min(num_before, plan.null_end)):
            if not blocks[entry].is_null:
                blocks.append(blocks[entry])
                blocks[entry] = null
                table.num_edits += 2  # more than one, so that no reader takes it for entries that became null
        table.blocks[:] = blocks  # the same list: a connector may keep it from step to step
        return blocks[num_before:]

    def count_surplus(self, table: BlockTable, num_tokens: int) -> int:
        if table.copy_position >= 0:
            return 0
        num_blocks = self.count_table_blocks(num_tokens) + self.num_speculative_blocks
        return max(0, len(table.blocks) - num_blocks)

    # ---- caching -----------------------------------------------------------------------------------

    def cache_state(
        self,
        request: SchedulableRequest,
        table: BlockTable,
        limit: int,
        num_prompt: int,
        interval: int | None,
    ) -> BlockHashWithGroupId | None:
        """Cache the state that a step saves in the middle, or the one after it, if the rules select it.

        The state after a step is cached if a prompt ends there, or at a junction.

        Args:
            limit: tokens that a hit may use after the step.
            interval: see `PrefixRules.retention_interval`.
        Returns:
            The key; None if no state is cached.
        """
        if table.checkpoint_position >= 0:
            return self._cache_checkpoint(request, table, num_prompt, interval)
        rules = self.rules
        unit = self.pool.hash_block_size
        if rules is None or limit <= 0 or limit % unit:
            return None
        if self.drops_hits and rules.num_reprefillable_tokens:
            return None  # the state is that after later tokens
        if rules.details.ends_within_blocks and limit % self.block_size == 0:
            return None
        if limit != self.find_checkpoint(num_prompt, unit) and not (
            self.caches_junctions
            and limit == table.junction
            and request.num_computed_tokens < limit <= num_prompt
        ):
            return None
        position = -(-limit // self.block_size) - 1
        if position >= len(table.blocks) or position == table.unaligned_position:
            return None
        if limit > len(request.block_hashes) * unit:
            return None
        block = table.blocks[position]
        if block.is_null or (block.num_key_tokens == limit and not rules.details.renews_states):
            return None
        key = cache_partial(self.pool, request, block, limit, self.group_id, self.block_size)
        if limit % self.block_size:
            # The next step overwrites the state.
            table.copy_position = position
            table.num_cached_blocks = position
            table.tail_tokens = limit
        return key

    def _cache_checkpoint(
        self, request: SchedulableRequest, table: BlockTable, num_prompt: int, interval: int | None
    ) -> BlockHashWithGroupId | None:
        """Cache the state that the step saves in the middle, unless no request is expected to hit it."""
        num_tokens = table.checkpoint_tokens
        block = table.blocks[table.checkpoint_position]
        num_hashed = len(request.block_hashes) * self.pool.hash_block_size
        is_kept = num_tokens in (self.find_checkpoint(num_prompt, self.hit_alignment), table.junction)
        if not is_kept and num_tokens % self.block_size == 0:
            is_kept = interval is None or (interval > 0 and num_tokens % interval == 0)
        if num_tokens > num_hashed or not is_kept:
            # The engine writes a state between two blocks' ends, not the one of the block's hash.
            if block.key is not None:
                evict_invalid(self.pool, [block])
            return None
        if block.num_key_tokens == num_tokens:
            return None
        return cache_partial(self.pool, request, block, num_tokens, self.group_id, self.block_size, True)
