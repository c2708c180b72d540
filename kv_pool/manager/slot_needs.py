"""`SlotNeeds`: how many blocks slots for a request take, now and at most."""

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.manager.block_copies import BlockCopies
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.manager.step import Step


@mypyc_attr(allow_interpreted_subclasses=False)
class SlotNeeds:
    """Counts for one manager's groups; changes nothing.

    Args:
        max_model_len, max_in_flight_tokens: see `KVCacheManager`; 0 for no bound.
        copies: references to the blocks that they are made of are not those of requests.
        retention: what it keeps counts as free.
    """

    def __init__(
        self,
        groups: list[BlockGroup],
        max_model_len: int,
        max_in_flight_tokens: int,
        copies: BlockCopies,
        retention: BlockRetention | None,
    ) -> None:
        self._groups: list[BlockGroup] = groups
        self._max_model_len: int = max_model_len
        self._max_in_flight_tokens: int = max_in_flight_tokens
        self._copies: BlockCopies = copies
        self._retention: BlockRetention | None = retention

    def _limit(self, num_tokens: int) -> int:
        """No more tokens than the longest request has."""
        return min(num_tokens, self._max_model_len) if self._max_model_len else num_tokens

    def count(self, step: Step) -> int:
        """Free blocks, hits among them, that slots for `step.num_tokens` tokens take, lookahead included."""
        tables = step.tables
        num_scheduled, num_tokens = step.num_scheduled, step.num_tokens
        num_encoder_tokens = step.num_encoder_tokens
        num_free = 0
        for group in self._groups:
            group_id = group.group_id
            num_blocks = self.count_blocks(group, num_scheduled, num_tokens, num_encoder_tokens)
            if tables is not None:
                table = tables[group_id]
                num_entries = len(table.blocks)
                num_free += group.count_new_blocks(num_entries, num_blocks)
                if table.is_forked:
                    num_free += len(self.list_shared(table, group, step.num_computed, num_blocks))
                continue
            hits = step.prefix_blocks[group_id]
            num_skipped = group.count_skipped_tokens(step.num_before) // group.block_size
            num_free += self._count_to_start(group, len(hits), num_skipped, step.num_before, num_blocks)
            num_free += self._count_free(hits, num_skipped)
        return num_free

    def count_blocks(
        self, group: BlockGroup, num_scheduled: int, num_tokens: int, num_encoder_tokens: int
    ) -> int:
        """Entries of a table with slots for so many tokens; `num_scheduled` of them are not only guessed."""
        if not group.is_cacheable:
            return group.count_table_blocks(num_encoder_tokens)
        return group.count_table_blocks(num_tokens if group.has_lookahead else num_scheduled)

    def count_full_sequence(self, step: Step, num_tokens: int) -> int:
        """Free blocks that are needed until all `num_tokens` tokens of the request have slots."""
        num_tokens = self._limit(num_tokens)
        tables = step.tables
        num_free = 0
        for group in self._groups:
            group_id = group.group_id
            num_most = self._count_most(group, num_tokens, step.num_encoder_tokens)
            if tables is not None:
                num_free += max(0, num_most - len(tables[group_id].blocks))
                continue
            hits = step.prefix_blocks[group_id]
            num_skipped = group.count_skipped_tokens(step.num_before) // group.block_size
            num_free += max(0, num_most - max(num_skipped, len(hits))) + self._count_free(hits, num_skipped)
        return num_free

    def count_most_blocks(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """Blocks that a request of so many tokens holds at most at a time, until all of them have slots."""
        num_tokens = self._limit(num_tokens)
        return sum([self._count_most(group, num_tokens, num_encoder_tokens) for group in self._groups])

    def fits_alone(self, num_usable: int, step: Step, num_sequence_tokens: int, reserved_blocks: int) -> bool:
        """Whether there would be room in a pool of `num_usable` blocks if nobody else held any.

        Nothing is shared then, and all hits are free blocks.
        Args:
            num_sequence_tokens: tokens that need slots in the end, where the whole sequence must fit; else 0.
        Cost: O(blocks of the request).
        """
        tables, num_before = step.tables, step.num_before
        num_scheduled, num_tokens = step.num_scheduled, step.num_tokens
        num_encoder_tokens = step.num_encoder_tokens
        num_now = 0
        num_in_the_end = 0
        num_held = 0
        num_forgotten = 0
        for group in self._groups:
            num_blocks = self.count_blocks(group, num_scheduled, num_tokens, num_encoder_tokens)
            num_most = 0
            if num_sequence_tokens:
                num_most = self._count_most(group, self._limit(num_sequence_tokens), num_encoder_tokens)
            num_skipped = group.count_skipped_tokens(num_before) // group.block_size
            if tables is not None:
                blocks = tables[group.group_id].blocks
                num_now += group.count_new_blocks(len(blocks), num_blocks)
                num_in_the_end += max(0, num_most - len(blocks))
                num_kept = _count_kept(blocks, num_skipped)
                num_all = _count_kept(blocks, 0)
                num_held += num_all
                num_forgotten += num_all - num_kept
                continue
            hits = step.prefix_blocks[group.group_id]
            num_hits = _count_kept(hits, num_skipped)
            num_now += num_hits + self._count_to_start(group, len(hits), num_skipped, num_before, num_blocks)
            num_in_the_end += num_hits + max(0, num_most - max(num_skipped, len(hits)))
        if num_sequence_tokens and num_in_the_end > num_usable - num_held:
            return False
        return num_now <= num_usable - num_held + num_forgotten - reserved_blocks

    def count_to_forget(self, request_id: str, tables: list[BlockTable], num_computed: int) -> int:
        """How many blocks giving up what no later token attends to would make free."""
        retention = self._retention
        num_free = 0
        for group in self._groups:
            table = tables[group.group_id]
            end = min(group.count_skipped_tokens(num_computed) // group.block_size, len(table.blocks))
            for position in range(table.num_null_blocks, end):
                block = table.blocks[position]
                if block.ref_cnt == 1 and not (
                    retention is not None and retention.will_pin(request_id, group.group_id, position, block)
                ):
                    num_free += 1
        return num_free

    def list_shared(
        self, table: BlockTable, group: BlockGroup, num_computed: int, num_blocks: int
    ) -> list[int]:
        """Positions of blocks that the step writes to and that others hold, too."""
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

    def _count_to_start(
        self, group: BlockGroup, num_hits: int, num_skipped: int, num_before: int, num_blocks: int
    ) -> int:
        """New blocks of a request without blocks: up to what is computed already, elsewhere too, then the
        rest, since a state needs one for each."""
        num_entries = max(num_skipped, num_hits)
        num_first = max(num_entries, group.count_table_blocks(num_before) if group.is_cacheable else 0)
        return group.count_new_blocks(num_entries, num_first) + group.count_new_blocks(num_first, num_blocks)

    def _count_most(self, group: BlockGroup, num_tokens: int, num_encoder_tokens: int) -> int:
        if not group.is_cacheable:
            return group.count_table_blocks(num_encoder_tokens)
        return group.count_most_blocks(num_tokens, self._max_in_flight_tokens, self._max_model_len)

    def _count_free(self, hits: Sequence[KVCacheBlock], first: int) -> int:
        """How many of the hits from `first` on leave the free blocks when they are touched."""
        num_free = 0
        for position in range(first, len(hits)):
            block = hits[position]
            if block.ref_cnt == 0 and not block.is_null:
                num_free += 1
        return num_free


def _count_kept(blocks: Sequence[KVCacheBlock], first: int) -> int:
    """How many from `first` on are blocks, and not the null block."""
    num_kept = 0
    for position in range(first, len(blocks)):
        if not blocks[position].is_null:
            num_kept += 1
    return num_kept
