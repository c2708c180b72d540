"""`SlotNeeds`: the number of blocks that a request's slots take, now and at most."""

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.manager.block_copies import BlockCopies
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.step import GroupPlan, Step
from kv_pool.manager.retention.block_retention import BlockRetention


@mypyc_attr(allow_interpreted_subclasses=False)
class SlotNeeds:
    """Counts blocks for one manager's groups; changes no table.

    Args:
        max_model_len, max_in_flight_tokens: see `KVCacheManager`; 0 for no bound.
        copies: the pending copies; their references to blocks are not those of requests.

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
    ) -> None:
        self._groups: list[BlockGroup] = groups
        self._max_model_len: int = max_model_len
        self._max_in_flight_tokens: int = max_in_flight_tokens
        self._copies: BlockCopies = copies
        self.retention: BlockRetention | None = None
        self.discounts_states: bool = False

    def _limit(self, num_tokens: int) -> int:
        """Limit a number of tokens to that of the longest request."""
        return min(num_tokens, self._max_model_len) if self._max_model_len else num_tokens

    def plan(self, step: Step, is_alone: bool = False) -> int:
        """Plan the step in each group, and return the number of free blocks that it needs.

        Args:
            is_alone: as if no other request held blocks: none is shared, and all hits are free.
        """
        need = 0
        step.plans = []
        for group in self._groups:
            plan = GroupPlan()
            if step.tables is not None:
                table = step.tables[group.group_id]
                if table.is_forked and not is_alone:
                    plan.shared = self._list_shared(group, table, step)
            group.plan(step, plan, is_alone)
            need += plan.need
            step.plans.append(plan)
        return need

    def count_full_sequence(
        self, step: Step, num_tokens: int, is_alone: bool = False, num_lookahead: int = 0
    ) -> int:
        """Return the number of free blocks needed until all `num_tokens` tokens of the request have slots.

        Args:
            num_lookahead: slots after them, for speculative tokens.
        """
        num_tokens = self._limit(num_tokens)
        need = 0
        for group in self._groups:
            num_most = self._count_most(group, num_tokens + num_lookahead, step.num_encoder_tokens)
            need += group.count_sequence(step, num_tokens, num_most, is_alone)
        return need

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
        return self.plan(step, True) <= num_usable + num_passed - step.num_reserved

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
        if tables is None or not self.discounts_states:
            return 0
        return sum([group.count_surplus(tables[group.group_id], num_tokens) for group in self._groups])

    def _list_shared(self, group: BlockGroup, table: BlockTable, step: Step) -> list[int]:
        """Return the positions of the blocks that the step writes to and that others hold, too."""
        if not group.is_cacheable:
            return []
        num_blocks = group.count_table_blocks(step.num_scheduled, step.num_lookahead)
        blocks = table.blocks
        shared: list[int] = []
        for position in range(group.find_first_written(step.num_computed, num_blocks), len(blocks)):
            block = blocks[position]
            if block.ref_cnt > 2 or (block.ref_cnt == 2 and not self._copies.is_source(block)):
                shared.append(position)
        return shared

    def _count_most(self, group: BlockGroup, num_tokens: int, num_encoder_tokens: int) -> int:
        if not group.is_cacheable:
            return group.count_table_blocks(0, 0, num_encoder_tokens)
        return group.count_max_blocks(num_tokens, self._max_in_flight_tokens, self._max_model_len)
