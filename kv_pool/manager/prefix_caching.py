"""`PrefixCaching`: caches the blocks of requests, as far as they can serve a hit."""

from collections.abc import Sequence
from typing import Any

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.caching import cache_full, cache_partial, note_left_out
from kv_pool.core.evicting import evict_invalid
from kv_pool.core.extra_keys import check_announceable, find_extra_keys
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.core.stored_events import hashes_of
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.applied_rules import AppliedRules, get_num_prompt_tokens, list_hashes
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable, TableListener
from kv_pool.manager.block_groups.mamba_group import MambaGroup
from kv_pool.manager.requests.request import SchedulableRequest


@mypyc_attr(allow_interpreted_subclasses=False)
class PrefixCaching(TableListener):
    """Registers blocks in the prefix map for all groups of a manager. `AppliedRules` select them.

    Args:
        rules: select the blocks. Without `PrefixRules`, ends of prompts within a block are not cached, and
            only the state after a step is, if it is at a block's end.

    Attributes:
        unwritten: keys of states whose content exists only after the step whose slots are being allocated.
        uncached: running requests that cache nothing any more; see `KVCacheManager.evict_owned`.
        has_encoder: whether K and V also depend on an encoder's input, through a group that is never hit.
        allows_missing_hashes: whether a request may lack hashes, as vLLM's may: blocks without one are not
            cached.
        offers_states: whether newly cached states are listed, for an engine that copies them elsewhere.
        state_offers: request, group, block and tokens of each such state.
    """

    def __init__(self, pool: BlockPoolCore, groups: list[BlockGroup], rules: AppliedRules) -> None:
        self._pool: BlockPoolCore = pool
        self._groups: list[BlockGroup] = groups
        self._rules: AppliedRules = rules
        self.unwritten: set[Any] = set()
        self.uncached: set[RequestId] = set()
        self.has_encoder: bool = any(not group.is_cacheable for group in groups)
        self._reads_whole_sequence: bool = any(group.reads_whole_sequence for group in groups)
        # Attention blocks of several hashes, whose parts can be hit.
        self._tail_groups: list[BlockGroup] = []
        # Whether parts of blocks, or states, are cached when a prompt ends.
        self._caches_ends: bool = False
        for group in groups:
            if group.is_cacheable and not rules.is_dense:
                if not group.forgets and group.stride > 1:
                    self._tail_groups.append(group)
                if group.reads_before_writes or group.stride > 1:
                    self._caches_ends = True
        self.allows_missing_hashes: bool = False
        self.offers_states: bool = False
        self.state_offers: list[tuple[RequestId, GroupId, KVCacheBlock, int]] = []

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

    def note_ended(self, request_id: RequestId, tables: Sequence[BlockTable]) -> None:
        """Withdraw the offers of a request's states."""
        if self.state_offers:
            self.state_offers = [offer for offer in self.state_offers if offer[0] != request_id]

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
        if not self._rules.is_dense:
            get_num_prompt_tokens(request)
        if self._pool.enable_kv_cache_events:
            check_announceable(request)
        return [self._limit(group, num_known) for group in self._groups]

    def _limit(self, group: BlockGroup, num_tokens: int) -> int:
        """Return the number of tokens, of those computed after a step, that a hit of this group may use."""
        num_final = max(0, num_tokens - self._rules.num_reprefillable)
        if len(self._groups) == 1:
            return num_final
        if self._rules.is_partial:
            if not group.drops_hits or not num_tokens:
                return num_tokens
            return num_final
        unit = self._rules.alignment
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
        if min(num_tokens, request.num_tokens) <= num_prompt + self._rules.num_reprefillable:
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
        num_prompt = 0 if self._rules.is_dense else get_num_prompt_tokens(request)
        for group in self._groups:
            if not group.is_cacheable:
                continue
            table = tables[group.group_id]
            limit = ends[group.group_id]
            first = table.num_cached_blocks
            end = min(limit, len(request.block_hashes) * self._pool.hash_block_size) // group.block_size
            if end > first:
                mask: list[bool] | None = None
                if isinstance(group, MambaGroup) and self._rules.is_dense:
                    # Of a step's states at block ends only the last is kept, and the one that is loaded
                    # before the step. Other states cover fewer tokens than their block.
                    mask = [
                        (position + 1) * group.block_size in (num_written, num_loaded)
                        for position in range(first, end)
                    ]
                elif group.forgets:
                    checkpoints = self._rules.list_checkpoints(num_prompt, table.junction, group)
                    mask = self._rules.select(group, first, end, checkpoints)
                self._cache_full(request, group, table, end, mask, num_prompt)
            if isinstance(group, MambaGroup):
                if not self._rules.is_dense:
                    self._cache_state(request, group, table, limit, num_prompt)
                else:
                    first = max(first, num_present // group.block_size)
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
        if self._rules.is_dense and mask is not None and True not in mask:
            hashes = hashes_of(self._pool, request, first, end, group.block_size)
            note_left_out(table.blocks[first:end], hashes, mask)  # without an event
        else:
            cache_full(self._pool, request, table.blocks, first, end, group.block_size, group.group_id, mask)
        table.num_cached_blocks = end
        if self._rules.chains is not None and isinstance(group, MambaGroup):
            junction = table.junction // group.block_size
            last = self._rules.find_end(num_prompt) // group.block_size
            for position in range(first, end):
                if mask is None or mask[position - first]:
                    is_end = position + 1 == last != junction
                    self._rules.chains.note_kept(table.blocks[position], table.resumed, is_end)

    def _find_tail(
        self, request: SchedulableRequest, group: BlockGroup, table: BlockTable, num_prompt: int
    ) -> int:
        """Return the tokens up to the last hash of a prompt; 0 if that is the end of a block.

        Some hashes may be missing: with lookahead hashes, the last ones cover tokens after the prompt.
        """
        unit = self._pool.hash_block_size
        is_whole = group.drops_hits or self._rules.details.caches_whole_prompts
        num_most = num_prompt if is_whole else num_prompt - 1
        num_tokens = min(num_most // unit, len(request.block_hashes)) * unit
        is_within = num_tokens % group.block_size > 0 and num_tokens < len(table.blocks) * group.block_size
        return num_tokens if is_within else 0

    def _cache_state(
        self, request: SchedulableRequest, group: MambaGroup, table: BlockTable, limit: int, num_prompt: int
    ) -> None:
        """Cache the state saved in the middle of the step, or that after it if a prompt ends there."""
        if table.checkpoint_position >= 0:
            self._cache_checkpoint(request, group, table, num_prompt)
            return
        unit = self._pool.hash_block_size
        if limit <= 0 or limit % unit or (group.drops_hits and self._rules.num_reprefillable):
            return  # or the state is that after later tokens
        if self._rules.details.ends_within_blocks and limit % group.block_size == 0:
            return
        if limit != group.find_checkpoint(num_prompt, unit) and not (
            self._rules.caches_junctions
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
        if block.is_null or (block.num_key_tokens == limit and not self._rules.details.renews_states):
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
            mask = self._rules.select(group, position, position + 1, [])
            is_kept = mask is None or mask[0]
        if num_tokens > num_hashed or (not is_kept and num_tokens != table.junction):
            # The engine writes a state between two blocks' ends, not the one of the block's hash.
            if block.key is not None:
                evict_invalid(self._pool, [block])
        elif block.num_key_tokens != num_tokens:
            cache_partial(self._pool, request, block, num_tokens, group.group_id, group.block_size, True)
            self.note_unwritten(block)
