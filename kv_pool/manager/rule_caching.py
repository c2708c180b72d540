"""`RuleCaching`: caches the blocks of requests under `PrefixRules`."""

from collections.abc import Sequence
from typing import Any

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import as_int, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.caching import cache_full, cache_partial
from kv_pool.core.evicting import evict_invalid
from kv_pool.core.extra_keys import check_announceable
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.mamba_group import MambaGroup
from kv_pool.manager.block_groups.state_chains import StateChains
from kv_pool.manager.checkpoint_choice import CheckpointChoice
from kv_pool.manager.prefix_caching import PrefixCaching, leave_out_cached
from kv_pool.manager.prefix_rules import PrefixRules
from kv_pool.manager.requests.request import SchedulableRequest


@mypyc_attr(allow_interpreted_subclasses=False)
class RuleCaching(PrefixCaching):
    """As `PrefixCaching`; a `CheckpointChoice` selects the blocks. Also caches the ends of prompts.

    Args:
        choice: selects full blocks.
        is_partial: whether hits may end within a block.
        chains: records the cached states; None without `PrefixRules.bounded_states`.

    Attributes:
        caches_junctions: whether states at junctions within a block are cached.
        unwritten: keys of states whose content exists only after the coming step.
        allows_missing_hashes: whether a request may lack hashes, as vLLM's may: blocks without one are not
            cached.
        offers_states: whether newly cached states are listed, for an engine that copies them elsewhere.
        state_offers: request, group, block and tokens of each such state.
    """

    def __init__(
        self,
        pool: BlockPoolCore,
        groups: list[BlockGroup],
        alignment: int,
        rules: PrefixRules,
        choice: CheckpointChoice,
        is_partial: bool,
        chains: StateChains | None,
    ) -> None:
        super().__init__(pool, groups, alignment)
        self._choice: CheckpointChoice = choice
        self._num_reprefillable: int = rules.num_reprefillable_tokens
        self._is_partial: bool = is_partial
        self.caches_junctions: bool = (
            rules.junction_states and is_partial and not rules.num_reprefillable_tokens
        )
        self._chains: StateChains | None = chains
        self._renews_states: bool = rules.details.renews_states
        self._caches_whole_prompts: bool = rules.details.caches_whole_prompts
        self._ends_within_blocks: bool = rules.details.ends_within_blocks
        # Attention blocks of several hashes, whose parts can be hit.
        self._tail_groups: list[BlockGroup] = [
            group for group in groups if group.is_cacheable and group.is_downward_closed and group.stride > 1
        ]
        # Whether parts of blocks, or states, are cached when a prompt ends.
        self._caches_ends: bool = any(
            group.is_cacheable and (group.reads_before_writes or group.stride > 1) for group in groups
        )
        self.allows_missing_hashes: bool = False
        self.offers_states: bool = False
        self.state_offers: list[tuple[RequestId, GroupId, KVCacheBlock, int]] = []

    def is_unwritten(self, prefix_blocks: Sequence[Sequence[KVCacheBlock]]) -> bool:
        for group in self._groups:
            blocks = prefix_blocks[group.group_id]
            if group.reads_before_writes and blocks and blocks[-1].key in self.unwritten:
                return True
        return False

    def note_unwritten(self, block: KVCacheBlock) -> None:
        self.unwritten.add(block.key)

    def find_ends(
        self,
        request: SchedulableRequest,
        tables: list[BlockTable] | None,
        num_prefix_tokens: int,
        num_tokens: int,
    ) -> list[int] | None:
        """As `PrefixCaching.find_ends`; None if no group has anything to cache."""
        num_tokens = min(num_tokens, request.num_tokens)
        if not self.allows_missing_hashes:
            self.check_hash_count(request, tables is None)
        num_hashed = len(request.block_hashes) * self._pool.hash_block_size
        limits = [0] * len(self._groups)
        is_any = False
        if self.has_encoder and not self.covers_encoder(request):
            return None
        if len(self.uncached) > 0 and request.request_id in self.uncached:
            return None
        for group in self._groups:
            if not group.is_cacheable:
                continue
            limit = self._limit(group, num_tokens)
            limits[group.group_id] = limit
            if group.reads_before_writes or group.stride > 1:
                is_any = True  # an end within a block may be due
            elif (
                tables is None
                or min(limit, num_hashed) // group.block_size > tables[group.group_id].num_cached_blocks
            ):
                is_any = True
        if not is_any:
            return None
        get_num_prompt_tokens(request)
        if self._pool.enable_kv_cache_events:
            check_announceable(request)
        return limits

    def cache(
        self,
        request: SchedulableRequest,
        tables: list[BlockTable],
        ends: list[int],
        num_written: int,
        is_written: bool,
        num_loaded: int = 0,
    ) -> None:
        num_prompt = get_num_prompt_tokens(request)
        for group in self._groups:
            if not group.is_cacheable:
                continue
            table = tables[group.group_id]
            limit = ends[group.group_id]
            first = table.num_cached_blocks
            end = min(limit, len(request.block_hashes) * self._pool.hash_block_size) // group.block_size
            if end > first:
                self._cache_full(request, group, table, end, num_prompt)
            if isinstance(group, MambaGroup):
                self._cache_state(request, group, table, limit, num_prompt)
                for block in table.blocks[first:end]:
                    if not block.is_null and block.key is not None:
                        self.unwritten.add(block.key)
                        self.offer_state(request.request_id, group.group_id, block, block.num_key_tokens)
            elif group in self._tail_groups:
                self._cache_tail(request, group, table, limit, num_prompt)

    def offer_state(
        self, request_id: RequestId, group_id: GroupId, block: KVCacheBlock, num_tokens: int
    ) -> None:
        """List a cached state for the engine, if it takes them: see `offers_states`."""
        if self.offers_states:
            self.state_offers.append((request_id, group_id, block, num_tokens))

    def _limit(self, group: BlockGroup, num_tokens: int) -> int:
        """Return the number of tokens, of those computed after a step, that a hit of this group may use."""
        num_final = max(0, num_tokens - self._num_reprefillable)
        if len(self._groups) == 1:
            return num_final
        if self._is_partial:
            if not group.drops_hits or not num_tokens:
                return num_tokens
            return num_final
        unit = self._alignment
        num_aligned = num_tokens // unit * unit
        if not group.drops_hits or not num_aligned:
            return num_aligned
        # A drafter finds and drops the block after the aligned end.
        return min(num_final, num_final // unit * unit + group.block_size)

    def _cache_full(
        self, request: SchedulableRequest, group: BlockGroup, table: BlockTable, end: int, num_prompt: int
    ) -> None:
        """Cache the full blocks up to `end` that the choice selects, with one event if any block is full."""
        choice = self._choice
        first = table.num_cached_blocks
        mask = choice.select(group, first, end, choice.list_checkpoints(num_prompt, table.junction, group))
        mask = leave_out_cached(table, first, end, group.block_size, mask)
        if first <= table.unaligned_position < end:
            if mask is None:
                mask = [True] * (end - first)
            mask[table.unaligned_position - first] = False
        cache_full(self._pool, request, table.blocks, first, end, group.block_size, group.group_id, mask)
        table.num_cached_blocks = end
        if self._chains is not None and isinstance(group, MambaGroup):
            junction = table.junction // group.block_size
            last = self._choice.find_end(num_prompt) // group.block_size
            for position in range(first, end):
                if mask is None or mask[position - first]:
                    is_end = position + 1 == last != junction
                    self._chains.note_kept(table.blocks[position], table.resumed, is_end)

    def _cache_tail(
        self, request: SchedulableRequest, group: BlockGroup, table: BlockTable, limit: int, num_prompt: int
    ) -> None:
        """Cache the block in which a prompt ends under the hash of its last tokens, too."""
        num_tokens = self._find_tail(request, group, table, num_prompt)
        if 0 < num_tokens <= limit:
            block = table.blocks[num_tokens // group.block_size]
            cache_partial(self._pool, request, block, num_tokens, group.group_id, group.block_size)

    def _find_tail(
        self, request: SchedulableRequest, group: BlockGroup, table: BlockTable, num_prompt: int
    ) -> int:
        """Return the tokens up to the last hash of a prompt; 0 if that is the end of a block.

        Some hashes may be missing: with lookahead hashes, the last ones cover tokens after the prompt.
        """
        unit = self._pool.hash_block_size
        num_most = num_prompt if group.drops_hits or self._caches_whole_prompts else num_prompt - 1
        num_tokens = min(num_most // unit, len(request.block_hashes)) * unit
        is_within = num_tokens % group.block_size > 0 and num_tokens < len(table.blocks) * group.block_size
        return num_tokens if is_within else 0

    def is_end_due(self, request: SchedulableRequest, tables: list[BlockTable], num_tokens: int) -> bool:
        """Return True if a step may cache the end of a prompt after `num_tokens` computed tokens.

        A state is cached when the step ends there. The end of an attention block may be cached some steps
        later: when its hash exists, or when the tokens after it are final.
        """
        if not self._caches_ends:
            return False
        num_prompt = get_num_prompt_tokens(request)
        if min(num_tokens, request.num_tokens) <= num_prompt + self._num_reprefillable:
            return True
        for group in self._tail_groups:
            table = tables[group.group_id]
            end = self._find_tail(request, group, table, num_prompt)
            if end and table.blocks[end // group.block_size].num_key_tokens < end:
                return True
        return False

    def _cache_state(
        self, request: SchedulableRequest, group: MambaGroup, table: BlockTable, limit: int, num_prompt: int
    ) -> None:
        """Cache the state saved in the middle of the step, or that after it if a prompt ends there."""
        if table.checkpoint_position >= 0:
            self._cache_checkpoint(request, group, table, num_prompt)
            return
        unit = self._pool.hash_block_size
        if limit <= 0 or limit % unit or (group.drops_hits and self._num_reprefillable):
            return  # or the state is that after later tokens
        if self._ends_within_blocks and limit % group.block_size == 0:
            return
        if limit != group.find_checkpoint(num_prompt, unit) and not (
            self.caches_junctions
            and limit == table.junction
            and request.num_computed_tokens < limit <= num_prompt
        ):
            return
        position = -(-limit // group.block_size) - 1
        if position >= len(table.blocks) or position == table.unaligned_position:
            return
        if limit > len(request.block_hashes) * unit:
            return
        block = table.blocks[position]
        if block.is_null or (block.num_key_tokens == limit and not self._renews_states):
            return
        key = cache_partial(self._pool, request, block, limit, group.group_id, group.block_size)
        if key is not None:
            self.unwritten.add(key)
        if limit % group.block_size:
            # The next step overwrites the state.
            table.copy_position = position
            table.num_cached_blocks = position
            table.tail_tokens = limit

    def _cache_checkpoint(
        self, request: SchedulableRequest, group: MambaGroup, table: BlockTable, num_prompt: int
    ) -> None:
        """Cache the state that the step saves in the middle, unless no request is expected to hit it."""
        num_tokens = table.checkpoint_tokens
        block = table.blocks[table.checkpoint_position]
        num_hashed = len(request.block_hashes) * self._pool.hash_block_size
        is_kept = num_tokens == group.find_checkpoint(num_prompt, group.hit_alignment)
        if not is_kept and num_tokens % group.block_size == 0:
            position = num_tokens // group.block_size - 1
            mask = self._choice.select(group, position, position + 1, [])
            is_kept = mask is None or mask[0]
        if num_tokens > num_hashed or (not is_kept and num_tokens != table.junction):
            # The engine writes a state between two blocks' ends, not the one of the block's hash.
            if block.key is not None:
                evict_invalid(self._pool, [block])
        elif block.num_key_tokens != num_tokens:
            cache_partial(self._pool, request, block, num_tokens, group.group_id, group.block_size, True)
            self.unwritten.add(block.key)


def get_num_prompt_tokens(request: SchedulableRequest) -> int:
    """Return the tokens of the request's prompt. Raise InvalidTypeError if it does not count them."""
    unchecked: Any = request
    try:
        num_prompt = unchecked.num_prompt_tokens
    except AttributeError:
        refuse_type("request", request, "a request with num_prompt_tokens, which prefix_rules need")
    return num_prompt if isinstance(num_prompt, int) else as_int("num_prompt_tokens", num_prompt)
