"""`SlotNeeds`: the number of blocks that a request's slots take, now and at most."""

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.manager.block_copies import BlockCopies
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.mamba_group import MambaGroup
from kv_pool.manager.block_groups.step import Step
from kv_pool.manager.retention.block_retention import BlockRetention


@mypyc_attr(allow_interpreted_subclasses=False)
class SlotNeeds:
    """Counts blocks for one manager's groups; changes nothing.

    Args:
        max_model_len, max_in_flight_tokens: see `KVCacheManager`; 0 for no bound.
        copies: the pending copies; their references to blocks are not those of requests.
        has_rules: whether the manager has `PrefixRules`: `count_full_sequence` then counts states as the
            first step needs them.
        plans_checkpoints: whether a group saves states in the middle of a step.

    Attributes:
        retention: blocks that it keeps count as free.
        discounts_states: whether surplus states may be used instead of blocks to leave free, as by vLLM.
    """

    def __init__(
        self,
        groups: list[BlockGroup],
        max_model_len: int,
        max_in_flight_tokens: int,
        copies: BlockCopies,
        has_rules: bool,
        plans_checkpoints: bool,
    ) -> None:
        self._groups: list[BlockGroup] = groups
        self._max_model_len: int = max_model_len
        self._max_in_flight_tokens: int = max_in_flight_tokens
        self._copies: BlockCopies = copies
        self.retention: BlockRetention | None = None
        self.discounts_states: bool = False
        self._has_rules: bool = has_rules
        self._plans_checkpoints: bool = plans_checkpoints

    def _limit(self, num_tokens: int) -> int:
        """Limit a number of tokens to that of the longest request."""
        return min(num_tokens, self._max_model_len) if self._max_model_len else num_tokens

    def count(self, step: Step, is_alone: bool = False) -> int:
        """Count the free blocks that the step's slots take, hits and lookahead included.

        Args:
            is_alone: count as if no other request held blocks: none is shared, and all hits are free.
        """
        num_free = 0
        for group in self._groups:
            num_blocks = group.count_table_blocks(
                step.num_scheduled, step.num_lookahead, step.num_encoder_tokens
            )
            if step.tables is not None:
                table = step.tables[group.group_id]
                num_entries = len(table.blocks)
                has_copy = table.copy_position >= 0
                if table.is_forked and not is_alone:
                    shared = self.list_shared(table, group, step.num_computed, num_blocks)
                    num_free += len(shared)
                    if table.copy_position in shared:
                        has_copy = False  # the cached state stays with the other request
                if group.adds_null_blocks:
                    if (
                        num_blocks > num_entries - table.num_speculative
                        or has_copy
                        or self._plans_checkpoints
                    ):
                        num_free += self._count_states(
                            group, step, step.num_scheduled, True, is_alone, has_copy
                        )
                    continue
            elif group.adds_null_blocks:
                num_free += self._count_states(group, step, step.num_scheduled, True, is_alone)
                continue
            else:
                num_entries, num_hits = _count_hits(group, step, is_alone)
                num_free += num_hits
            if num_blocks > num_entries:
                num_free += group.count_new_blocks(num_entries, num_blocks)
        return num_free

    def _count_states(
        self,
        group: BlockGroup,
        step: Step,
        num_tokens: int,
        is_step: bool,
        is_alone: bool,
        has_copy: bool = False,
    ) -> int:
        """Count the blocks that the states of a step take which ends after `num_tokens` tokens.

        Args:
            is_step: False for the whole sequence: as vLLM, count it like a step without external tokens.
            has_copy: for a request with tables, whether its cached state is copied first.
        """
        assert isinstance(group, MambaGroup)
        num_free = 0
        if step.tables is not None:
            table = step.tables[group.group_id]
            num_entries = 0
        else:
            table = None
            hits = step.prefix_blocks[group.group_id]
            num_entries, num_free = _count_hits(group, step, is_alone)
            has_copy = len(hits) > 0 and step.num_prefix % group.block_size > 0
            if step.num_before > step.num_prefix:
                # The state after the external tokens has a block of its own.
                num_entries = len(hits)
                if is_step and not group.counts_most_states:
                    num_free += 1
                    num_entries = group.count_table_blocks(step.num_before)
                if self._has_rules and hits and hits[-1].ref_cnt == 0 and not hits[-1].is_null:
                    num_free += 1  # vLLM counts the hit, too
        has_checkpoint = (
            group.checkpoint_alignment > 0
            and group.plan_checkpoint(table, step.num_before, num_tokens, step.prefill_end) > 0
        )
        return num_free + group.count_states(
            table, num_entries, num_tokens, has_copy=has_copy, has_checkpoint=has_checkpoint
        )

    def count_full_sequence(
        self, step: Step, num_tokens: int, is_alone: bool = False, num_lookahead: int = 0
    ) -> int:
        """Count as `count` does, but until all `num_tokens` tokens of the request have slots.

        Args:
            num_lookahead: slots after them, for speculative tokens.
        """
        num_tokens = self._limit(num_tokens)
        tables = step.tables
        num_free = 0
        for group in self._groups:
            if group.adds_null_blocks and self._has_rules:
                has_copy = tables is not None and tables[group.group_id].copy_position >= 0
                num_free += self._count_states(group, step, num_tokens, False, is_alone, has_copy)
                continue
            num_most = self._count_most(group, num_tokens + num_lookahead, step.num_encoder_tokens)
            if tables is not None:
                num_free += max(0, num_most - len(tables[group.group_id].blocks))
            else:
                num_entries, num_hits = _count_hits(group, step, is_alone)
                num_free += num_hits + max(0, num_most - num_entries)
        return num_free

    def count_max_blocks(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """Return the most blocks that a request holds at a time until all `num_tokens` tokens have slots."""
        num_tokens = self._limit(num_tokens)
        return sum([self._count_most(group, num_tokens, num_encoder_tokens) for group in self._groups])

    def fits_alone(self, num_usable: int, step: Step) -> bool:
        """Return True if a pool of `num_usable` blocks would suffice if no other request held any.

        Cost: O(blocks of the request).
        """
        num_passed = 0
        if step.tables is not None:
            for group, table in zip(self._groups, step.tables, strict=True):
                end = group.count_skipped_tokens(step.num_before) // group.block_size
                for position, block in enumerate(table.blocks):
                    if not block.is_null:
                        num_usable -= 1
                        num_passed += position < end
        if step.num_sequence and self.count_full_sequence(step, step.num_sequence, True) > num_usable:
            return False
        return self.count(step, True) <= num_usable + num_passed - step.num_reserved

    def list_own_blocks(self, step: Step) -> list[KVCacheBlock]:
        """Return the blocks in the request's tables, or those of its prefix that it keeps."""
        own: list[KVCacheBlock] = []
        for group in self._groups:
            if step.tables is not None:
                own += step.tables[group.group_id].blocks
            else:
                num_skipped = group.count_skipped_tokens(step.num_before) if group.forgets else 0
                own += step.prefix_blocks[group.group_id][num_skipped // group.block_size :]
        return own

    def count_to_forget(self, step: Step) -> int:
        """Count the blocks that become free if blocks which no later token attends to are released."""
        tables = step.tables
        if tables is None:
            return 0
        retention = self.retention
        num_free = 0
        for group in self._groups:
            table = tables[group.group_id]
            end = min(group.count_skipped_tokens(step.num_final) // group.block_size, len(table.blocks))
            for position in range(table.num_null_blocks, end):
                block = table.blocks[position]
                if block.ref_cnt == 1 and not (
                    retention is not None
                    and retention.will_pin(step.request_id, group.group_id, position, block)
                ):
                    num_free += 1
        return num_free

    def count_surplus(self, tables: list[BlockTable] | None, num_tokens: int) -> int:
        """Return the state blocks that rejected drafts have left beyond those of `num_tokens` tokens.

        0 unless `discounts_states`: vLLM then subtracts them from the blocks to leave free.
        """
        num_surplus = 0
        if tables is None or not self.discounts_states:
            return 0
        for group in self._groups:
            if isinstance(group, MambaGroup):
                table = tables[group.group_id]
                num_blocks = group.count_table_blocks(num_tokens) + group.num_speculative_blocks
                if table.copy_position < 0:
                    num_surplus += max(0, len(table.blocks) - num_blocks)
        return num_surplus

    def list_shared(
        self, table: BlockTable, group: BlockGroup, num_computed: int, num_blocks: int
    ) -> list[int]:
        """Return the positions of the blocks that the step writes to and that others hold, too."""
        if not group.is_cacheable:
            return []
        blocks = table.blocks
        first = group.find_first_written(num_computed, num_blocks)
        shared: list[int] = []
        for position in range(first, len(blocks)):
            block = blocks[position]
            if block.ref_cnt > 2 or (block.ref_cnt == 2 and not self._copies.is_source(block)):
                shared.append(position)
        return shared

    def _count_most(self, group: BlockGroup, num_tokens: int, num_encoder_tokens: int) -> int:
        if not group.is_cacheable:
            return group.count_table_blocks(0, 0, num_encoder_tokens)
        return group.count_max_blocks(num_tokens, self._max_in_flight_tokens, self._max_model_len)


def _count_hits(group: BlockGroup, step: Step, is_alone: bool) -> tuple[int, int]:
    """Return the number of entries a table starts with, and the free blocks that its hits take.

    These are hits on free blocks, and the copy of a block in which the hit ends.
    """
    hits = step.prefix_blocks[group.group_id]
    num_skipped = 0
    if group.forgets:
        num_skipped = group.count_skipped_tokens(step.num_before) // group.block_size
    num_hits = 0
    for position in range(num_skipped, len(hits)):
        block = hits[position]
        if (is_alone or block.ref_cnt == 0) and not block.is_null:
            num_hits += 1
    if step.num_prefix % group.block_size and hits and not group.adds_null_blocks:
        num_hits += 1
    return max(num_skipped, len(hits)), num_hits
