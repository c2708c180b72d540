"""`PrefixCaching`: what the groups of one manager look up and cache, by its `PrefixRules` or without any."""

from collections.abc import Sequence
from typing import Any, Final

from mypy_extensions import i64, mypyc_attr

from kv_pool.core.arguments import as_int, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.caching import cache_full, cache_partial, note_left_out
from kv_pool.core.extra_keys import check_announceable, find_extra_keys
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.core.stored_events import hashes_of
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.ids import BlockHash, GroupId, RequestId
from kv_pool.manager.block_groups.block_group import (
    BlockGroup,
    ChunkedLocalGroup,
    EqualGroups,
    PrefixLookup,
    SlidingWindowGroup,
)
from kv_pool.manager.block_groups.block_table import BlockTable, Step, TableListener
from kv_pool.manager.block_groups.kv_cache_spec import KVCacheSpec
from kv_pool.manager.block_groups.mamba_group import MambaGroup
from kv_pool.manager.block_groups.state_chains import StateChains
from kv_pool.manager.prefix_rules import (
    PrefixRules,
    RuleDetails,
    can_hit_parts,
    check_interval,
    check_rules,
    list_equal_groups,
)
from kv_pool.manager.requests.request import SchedulableRequest

DENSE: Final = PrefixRules(retention_interval=None, partial_hits=False)


@mypyc_attr(allow_interpreted_subclasses=False)
class PrefixCaching(TableListener):
    """Finds the prefixes of requests, and registers the blocks of their tables in the prefix map.

    Without rules, all full blocks that can serve a hit are cached; ends of prompts within a block are not,
    and only the state after a step is, if it is at a block's end. With rules, full blocks of windows and
    states are cached at checkpoints, every N tokens, or all:

    window 4, block size 2, alignment 4; the prompt has 19 tokens, the interval is 0
    tokens   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15 | 16 17 | 18
    cached                                         x       x                    a resend hits 16 tokens

    Args:
        rules: None for a manager that caches all blocks which can serve a hit.
        alignment: tokens; the least common multiple of all block sizes.

    Attributes:
        is_partial: whether hits may end within a block.
        has_states: whether a group has states.
        caches_junctions: whether states at junctions within a block are cached.
        interval: the retention interval; None to cache all blocks that can serve a hit.
        hit_alignment: tokens; each hit is a multiple of it.
        chains: the cached states as turns of conversations; None without `bounded_states`.
        lookup: finds prefixes in the groups.
        unwritten: keys of states whose content exists only after the step whose slots are being allocated.
        uncached: running requests that cache nothing any more; see `KVCacheManager.evict_owned`.
        has_encoder: whether K and V also depend on an encoder's input, through a group that is never hit.
        allows_missing_hashes: whether a request may lack hashes, as vLLM's may: blocks without one are not
            cached.
        offers_states: whether newly cached states are listed, for an engine that copies them elsewhere.
        state_offers: request, group, block and tokens of each such state.
    Raises:
        InvalidArgumentError: the rules do not fit the groups.
    """

    def __init__(
        self,
        rules: PrefixRules | None,
        specs: tuple[KVCacheSpec, ...],
        groups: list[BlockGroup],
        pool: BlockPoolCore,
        alignment: int,
    ) -> None:
        self._is_dense: bool = rules is None
        if rules is None:
            rules = DENSE
        details = rules.details
        check_rules(rules, specs, alignment)
        unit = pool.hash_block_size
        self._pool: BlockPoolCore = pool
        self._groups: list[BlockGroup] = groups
        self._details: RuleDetails = details
        self._alignment: int = alignment
        self.is_partial: bool = rules.partial_hits and pool.enable_caching and can_hit_parts(specs, unit)
        self.interval: int | None = rules.retention_interval
        self.hit_alignment: int = unit if self.is_partial else alignment
        self.has_states: bool = any(isinstance(group, MambaGroup) for group in groups)
        self._num_reprefillable: int = rules.num_reprefillable_tokens
        self.caches_junctions: bool = (
            rules.junction_states and self.is_partial and not rules.num_reprefillable_tokens
        )
        # Blocks of a window that are cached before each boundary; a window of 1 token needs none.
        self._least_hit_blocks: int = 1 if self._is_dense else 0
        self.chains: StateChains | None = StateChains() if rules.bounded_states else None
        self.unwritten: set[Any] = set()
        self.uncached: set[RequestId] = set()
        self.has_encoder: bool = any(not group.is_cacheable for group in groups)
        self._reads_whole_sequence: bool = any(group.reads_whole_sequence for group in groups)
        self.allows_missing_hashes: bool = False
        self.offers_states: bool = False
        self.state_offers: list[tuple[RequestId, GroupId, KVCacheBlock, int]] = []
        eagle_groups = set(rules.eagle_groups)
        # Whether hits of any group drop their last block, for a drafter.
        self._has_drafter: bool = len(eagle_groups) > 0
        parts: list[EqualGroups] = []
        for together in list_equal_groups(rules, specs):
            drops_hits = not eagle_groups.isdisjoint(together)
            for group_id in together:
                groups[group_id].drops_hits = drops_hits
            parts.append(EqualGroups([groups[number] for number in together], self.hit_alignment, drops_hits))
        self.lookup: PrefixLookup = PrefixLookup(parts, len(groups), unit, details.looks_past_limit)
        # Attention blocks of several hashes, whose parts can be hit.
        self._tail_groups: list[BlockGroup] = []
        # Whether parts of blocks, or states, are cached when a prompt ends.
        self._caches_ends: bool = False
        # Whether a group saves states in the middle of a step.
        self._plans_checkpoints: bool = False
        for group in groups:
            if group.is_cacheable and not self._is_dense:
                if not group.forgets and group.stride > 1:
                    self._tail_groups.append(group)
                if group.reads_before_writes or group.stride > 1:
                    self._caches_ends = True
            if isinstance(group, MambaGroup):
                if not self._is_dense:
                    group.follow(rules, self._has_drafter, self.hit_alignment, self.caches_junctions)
                if group.checkpoint_alignment:
                    self._plans_checkpoints = True
                    if self._is_dense:
                        raise InvalidArgumentError(
                            "a MambaSpec with prefill_checkpoint_alignment needs prefix_rules, which select "
                            "its states"
                        )
            elif isinstance(group, ChunkedLocalGroup) and group.drops_hits:
                raise InvalidArgumentError(
                    f"group {group.group_id} is in eagle_groups; local attention in chunks cannot drop the "
                    "last block of a hit"
                )

    # ---- looking -----------------------------------------------------------------------------------

    def covers_encoder(self, request: SchedulableRequest) -> bool:
        """Return whether the request's hashes cover the encoder's input, on which its K and V depend, too.

        They do if the first block's hash covers all its multimodal inputs or, without such inputs, a salt. If
        an encoder reads the whole prompt, only a salt can stand for that. True without `has_encoder`. A
        request that its hashes do not cover is neither cached nor hit, on the device and in lower tiers.
        """
        if not self.has_encoder:
            return True
        num_inputs = num_salts = 0
        for key in find_extra_keys(request, 0, self._pool.hash_block_size) or ():
            num_inputs += key[0] in ("mm", "media")
            num_salts += key[0] in ("cache_salt", "salt_region")
        features = request.mm_features
        if not features or self._reads_whole_sequence:
            return num_salts > 0
        return num_inputs == len(features)

    def set_interval(self, interval: int | None) -> None:
        """Replace the retention interval for blocks that are cached from now on.

        Raises:
            InvalidArgumentError: it is no multiple of the alignment, or not 0 with `bounded_states`.
        """
        check_interval(interval, self._alignment)
        if self.chains is not None and interval != 0:
            raise InvalidArgumentError(f"retention_interval is {interval}; bounded_states needs 0")
        self.interval = interval

    def find_prefix(
        self, request: SchedulableRequest, max_num_tokens: int
    ) -> tuple[list[list[KVCacheBlock]], int, int]:
        """Return the blocks of the longest prefix by group, its tokens, and a further checkpoint; 0 for none.

        The checkpoint is the junction of a shared prefix. With `bounded_states`, it is not kept for the next
        turn of a conversation, and the middle of a prompt takes its place.
        """
        hashes = list_hashes(request)
        blocks, num_tokens, junction = self.lookup.find(hashes, max_num_tokens)
        if self._is_dense:
            return blocks, num_tokens, 0
        chains = self.chains
        if chains is None:
            return blocks, num_tokens, junction
        if junction:
            last = self.lookup.find_full_block(hashes, junction)
            if last is None or not chains.is_next_turn(last, request.request_id):
                return blocks, num_tokens, junction
        return blocks, num_tokens, self.find_middle(get_num_prompt_tokens(request), num_tokens)

    def list_step_ends(self, request: SchedulableRequest, num_hit: int, junction: int) -> list[int]:
        """Return the positions after the hit at which the prompt's steps must end to cache their states."""
        if self._is_dense or not self.has_states:
            return []
        num_prompt = get_num_prompt_tokens(request)
        end = self.find_end(num_prompt)
        alignment = self._alignment
        ends = {end, junction // alignment * alignment}
        interval = alignment if self.interval is None else self.interval
        if interval:
            ends.update(range(interval, end, interval))
        return [position for position in sorted(ends) if num_hit < position <= num_prompt]

    def find_prefill_end(self, request: SchedulableRequest) -> i64:
        """Return the tokens that a step must reach to save a state on its way; 0 for any step."""
        if not self._plans_checkpoints or self.interval != 0:
            return 0
        return max(get_num_prompt_tokens(request), request.num_tokens - 1)

    # ---- states that are not written yet -----------------------------------------------------------

    def begin_step(self) -> None:
        """Start a step: all blocks allocated so far are written before blocks allocated later are read."""
        if len(self.unwritten) > 0:  # compiled, this is cheaper than the set's truth value
            self.unwritten = set()

    def note_unwritten(self, block: KVCacheBlock) -> None:
        """Note that a copied or new state can be hit, and is written only before or in the coming step."""
        self.unwritten.add(block.key)

    def is_unwritten(self, prefix_blocks: Sequence[Sequence[KVCacheBlock]]) -> bool:
        """Return True if a request with this prefix must wait for the next step."""
        if len(self.unwritten) == 0 or len(prefix_blocks) == 0:
            return False
        for group in self._groups:
            blocks = prefix_blocks[group.group_id]
            if group.reads_before_writes and blocks and blocks[-1].key in self.unwritten:
                return True
        return False

    def offer_state(
        self, request_id: RequestId, group_id: GroupId, block: KVCacheBlock, num_tokens: int
    ) -> None:
        """List a cached state for the engine, if it takes them: see `offers_states`."""
        if self.offers_states:
            self.state_offers.append((request_id, group_id, block, num_tokens))

    def note_step(self, request: SchedulableRequest, tables: list[BlockTable], step: Step) -> None:
        """Record states that a step of known tokens leaves within a block, so that they are not cached.

        Drafts are not known yet: after a step with drafts the engine itself saves the state at a block's end.
        """
        if self._is_dense or not self.has_states or self._plans_checkpoints:
            return
        if step.num_scheduled > request.num_tokens:
            return
        for group in self._groups:
            if isinstance(group, MambaGroup) and step.num_before % group.block_size:
                position = step.num_before // group.block_size
                if step.num_scheduled > (position + 1) * group.block_size:
                    tables[group.group_id].unaligned_position = position

    def note_ended(self, request_id: RequestId, tables: Sequence[BlockTable]) -> None:
        """Withdraw the offers of a request's states, and record where the request has ended."""
        if self.state_offers:
            self.state_offers = [offer for offer in self.state_offers if offer[0] != request_id]
        if self.chains is not None and self.lookup.full is not None:
            table = tables[self.lookup.full.first.group_id]
            if table.num_cached_blocks:
                self.chains.note_ended(table.blocks[table.num_cached_blocks - 1])

    # ---- which blocks are cached -------------------------------------------------------------------

    def list_checkpoints(self, num_prompt_tokens: int, junction: int, group: BlockGroup) -> list[int]:
        """Return the positions, in tokens, at which later requests are expected to continue.

        The end of the prompt: for the same prompt, whose last token is computed again, and for a longer one.
        With a drafter, the block before each of them. The junction of a shared prefix, if there is one.
        """
        if self._has_drafter:
            checkpoints = [self.find_end(num_prompt_tokens - 1), self.find_end(num_prompt_tokens)]
        else:
            checkpoints = [num_prompt_tokens - 1]
        if junction:
            checkpoints.append(junction)
            if group.drops_hits and self._details.doubles_junctions:
                checkpoints.append(junction - group.block_size)
        return checkpoints

    def find_end(self, num_prompt_tokens: int) -> int:
        """Return the position of the last checkpoint of a prompt, a multiple of the alignment."""
        unit = self._alignment
        if self._has_drafter:
            return max(0, num_prompt_tokens // unit - 1) * unit
        return (num_prompt_tokens - 1) // unit * unit

    def find_middle(self, num_prompt_tokens: int, num_hit: int) -> int:
        """Return the middle of the new part of a prompt that is mostly new; 0 for none.

            |--- hit ---|-------- new --------|
            0        num_hit     middle      end

        If later requests share a part of the new tokens, more than half of a long shared prefix is hit by the
        second request already. It has the state at the junction computed, for the third. A prompt that mostly
        continues a hit needs no middle: later requests that diverge in it continue from the hit, too.
        """
        end = self.find_end(num_prompt_tokens)
        if end - num_hit <= num_hit:
            return 0
        middle = (num_hit + end) // 2 // self._alignment * self._alignment
        return middle if middle > num_hit else 0

    def select(self, group: BlockGroup, first: int, end: int, checkpoints: list[int]) -> list[bool] | None:
        """Return which of the blocks `[first, end)` of a table to cache; None for all.

        Those that hits at the checkpoints, and at multiples of the interval, need: several blocks of a
        window, one state.

        Args:
            checkpoints: the result of `list_checkpoints`, or [] for the interval alone.
        """
        if isinstance(group, SlidingWindowGroup):
            num_needed = max(self._least_hit_blocks, group.count_hit_blocks(group.drops_hits))
            shift = 1 if group.drops_hits else 0  # the dropped block lies behind the boundary
            interval = self.hit_alignment if self.interval is None else self.interval
        elif isinstance(group, MambaGroup) and self.interval is not None:
            num_needed = 1
            shift = 0
            interval = self.interval
        else:
            return None
        block_size = group.block_size
        mask = [False] * (end - first)
        if interval:
            per_segment = interval // block_size
            if num_needed >= per_segment:
                return None
            for position in range(max(first, shift), end):
                if (position - shift) % per_segment >= per_segment - num_needed:
                    mask[position - first] = True
        if self.interval is not None:
            for checkpoint in checkpoints:
                boundary = checkpoint // self.hit_alignment * self.hit_alignment // block_size + shift
                for position in range(max(first, boundary - num_needed), min(end, boundary)):
                    mask[position - first] = True
        return mask

    # ---- what a step caches ------------------------------------------------------------------------

    def find_ends(
        self,
        request: SchedulableRequest,
        tables: list[BlockTable] | None,
        num_prefix_tokens: int,
        num_tokens: int,
    ) -> list[int] | None:
        """Find what `cache` may cache of the first `num_tokens` tokens. Changes nothing.

        Args:
            tables: None for a request without blocks; its hits are the first `num_prefix_tokens` tokens.
        Returns:
            For each group, the tokens that a hit may use once they are computed; None if nothing is to be
            cached.
        Raises:
            InvalidArgumentError, InvalidTypeError: the request lacks the hashes of these blocks, a new one
                lacks a hash for a full block of its known tokens, or an event could not name its keys.
        """
        if not self.covers_encoder(request):
            return None
        if len(self.uncached) > 0 and tables is not None and request.request_id in self.uncached:
            return None
        num_all = request.num_tokens
        num_known = min(num_tokens, num_all)
        is_due = self._caches_ends
        for group in self._groups:
            if group.is_cacheable:
                end = self._limit(group, num_known)
                first = num_prefix_tokens // group.block_size
                if tables is not None:
                    first = tables[group.group_id].num_cached_blocks
                if end // group.block_size > first:
                    is_due = True
                    self._check_hash_types(request, first * group.stride, end // self._pool.hash_block_size)
        if not self.allows_missing_hashes:
            num_needed = num_known if is_due else 0
            self.check_hash_count(request, num_all, num_all if tables is None else num_needed)
        if not is_due:
            return None
        if not self._is_dense:
            get_num_prompt_tokens(request)
        if self._pool.enable_kv_cache_events:
            check_announceable(request)
        return [self._limit(group, num_known) for group in self._groups]

    def _limit(self, group: BlockGroup, num_tokens: int) -> int:
        """Return the number of tokens, of those computed after a step, that a hit of this group may use."""
        num_final = max(0, num_tokens - self._num_reprefillable)
        if len(self._groups) == 1:
            return num_final
        if self.is_partial:
            if not group.drops_hits or not num_tokens:
                return num_tokens
            return num_final
        unit = self._alignment
        num_aligned = num_tokens // unit * unit
        if not group.drops_hits or not num_aligned:
            return num_aligned
        # A drafter finds and drops the block after the aligned end.
        return min(num_final, num_final // unit * unit + group.block_size)

    def _check_hash_types(self, request: SchedulableRequest, first: int, end: int) -> None:
        listed: list[Any] = list_hashes(request)
        for position in range(first, min(end, len(listed))):
            if not isinstance(listed[position], bytes):
                raise InvalidTypeError(
                    f"block hash {position} is a {type(listed[position]).__name__}; hashes are bytes"
                )

    def check_hash_count(self, request: SchedulableRequest, num_known: int, num_tokens: int) -> None:
        """Raise InvalidArgumentError for a request that was hashed with another block size.

        Args:
            num_known: the request's `num_tokens`.
            num_tokens: also if a hash of these tokens is missing.
        """
        unit = self._pool.hash_block_size
        num_hashed = len(request.block_hashes) * unit
        num_missing = min(num_tokens, num_known - self._pool.num_hash_lookahead_tokens) - num_hashed
        if num_hashed > num_known or num_missing >= unit:
            raise InvalidArgumentError(
                f"request {request.request_id!r} has {num_known} tokens but hashes for {num_hashed}. Was its "
                f"hasher made with another block size than the pool's {unit}?"
            )

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

    # ---- caching -----------------------------------------------------------------------------------

    def cache(
        self,
        request: SchedulableRequest,
        tables: list[BlockTable],
        ends: list[int],
        num_written: int,
        num_present: int = 0,
        num_loaded: int = 0,
    ) -> None:
        """Cache the blocks of each table, from the head to its end in `ends`, that are not cached yet.

        Part of a larger call, which has set `is_changing`.

        Args:
            ends: the result of `find_ends`.
            num_written: tokens after the step, including speculative ones in blocks that are not full.
            num_present: tokens whose content is there already, not only after the coming step. With rules,
                new states count as unwritten nevertheless.
            num_loaded: tokens with the external ones, whose state is there before the step; 0 for none.
        """
        num_prompt = 0 if self._is_dense else get_num_prompt_tokens(request)
        for group in self._groups:
            if not group.is_cacheable:
                continue
            table = tables[group.group_id]
            limit = ends[group.group_id]
            first = table.num_cached_blocks
            end = min(limit, len(request.block_hashes) * self._pool.hash_block_size) // group.block_size
            if end > first:
                mask: list[bool] | None = None
                if isinstance(group, MambaGroup) and self._is_dense:
                    # Of a step's states at block ends only the last is kept, and the one that is loaded
                    # before the step. Other states cover fewer tokens than their block.
                    mask = [
                        (position + 1) * group.block_size in (num_written, num_loaded)
                        for position in range(first, end)
                    ]
                elif group.forgets:
                    checkpoints = self.list_checkpoints(num_prompt, table.junction, group)
                    mask = self.select(group, first, end, checkpoints)
                self._cache_full(request, group, table, end, mask, num_prompt)
            if isinstance(group, MambaGroup):
                if self._is_dense:
                    first = max(first, num_present // group.block_size)
                else:
                    key = group.cache_state(request, table, limit, num_prompt, self.interval)
                    if key is not None:
                        self.unwritten.add(key)
                for block in table.blocks[first:end]:
                    if not block.is_null and block.key is not None:
                        self.note_unwritten(block)
                        self.offer_state(request.request_id, group.group_id, block, block.num_key_tokens)
            elif group in self._tail_groups:
                # The block in which a prompt ends is cached under the hash of its last tokens, too.
                num_tokens = self._find_tail(request, group, table, num_prompt)
                if 0 < num_tokens <= limit:
                    block = table.blocks[num_tokens // group.block_size]
                    cache_partial(self._pool, request, block, num_tokens, group.group_id, group.block_size)

    def _cache_full(
        self,
        request: SchedulableRequest,
        group: BlockGroup,
        table: BlockTable,
        end: int,
        mask: list[bool] | None,
        num_prompt: int,
    ) -> None:
        """Cache the full blocks up to `end` that the mask selects. With rules, one event even if it is none.

        Left out are those that a fork, which continued first, has cached, and a state within its block.
        """
        first = table.num_cached_blocks
        for position in range(first, end):
            block = table.blocks[position]
            is_cached = block.key is not None and block.num_key_tokens >= (position + 1) * group.block_size
            if is_cached or position == table.unaligned_position:
                if mask is None:
                    mask = [True] * (end - first)
                mask[position - first] = False
        if self._is_dense and mask is not None and True not in mask:
            hashes = hashes_of(self._pool, request, first, end, group.block_size)
            note_left_out(table.blocks[first:end], hashes, mask)  # without an event
        else:
            cache_full(self._pool, request, table.blocks, first, end, group.block_size, group.group_id, mask)
        table.num_cached_blocks = end
        if self.chains is not None and isinstance(group, MambaGroup):
            junction = table.junction // group.block_size
            last = self.find_end(num_prompt) // group.block_size
            for position in range(first, end):
                if mask is None or mask[position - first]:
                    is_end = position + 1 == last != junction
                    self.chains.note_kept(table.blocks[position], table.resumed, is_end)

    def _find_tail(
        self, request: SchedulableRequest, group: BlockGroup, table: BlockTable, num_prompt: int
    ) -> int:
        """Return the tokens up to the last hash of a prompt; 0 if that is the end of a block.

        Some hashes may be missing: with lookahead hashes, the last ones cover tokens after the prompt.
        """
        unit = self._pool.hash_block_size
        is_whole = group.drops_hits or self._details.caches_whole_prompts
        num_most = num_prompt if is_whole else num_prompt - 1
        num_tokens = min(num_most // unit, len(request.block_hashes)) * unit
        is_within = num_tokens % group.block_size > 0 and num_tokens < len(table.blocks) * group.block_size
        return num_tokens if is_within else 0


def list_hashes(request: Any) -> list[BlockHash]:
    """Return the block hashes of a request, which may be an engine's own sequence, as a list."""
    hashes: Any = request.block_hashes
    return hashes if isinstance(hashes, list) else list(hashes)


def get_num_prompt_tokens(request: SchedulableRequest) -> int:
    """Return the tokens of the request's prompt. Raise InvalidTypeError if it does not count them."""
    unchecked: Any = request
    try:
        num_prompt = unchecked.num_prompt_tokens
    except AttributeError:
        refuse_type("request", request, "a request with num_prompt_tokens, which prefix_rules need")
    return num_prompt if isinstance(num_prompt, int) else as_int("num_prompt_tokens", num_prompt)
