"""`AppliedRules`: what the groups of one manager look up and cache, by its `PrefixRules` or without any."""

from collections.abc import Sequence
from typing import Any, Final

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import as_int, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHash, GroupId, RequestId
from kv_pool.manager.block_groups.block_group import (
    BlockGroup,
    ChunkedLocalGroup,
    EqualGroups,
    PrefixLookup,
    SlidingWindowGroup,
)
from kv_pool.manager.block_groups.block_table import BlockTable, Step, TableListener
from kv_pool.manager.block_groups.kv_cache_spec import KVCacheSpec, MambaSpec, SlidingWindowSpec
from kv_pool.manager.block_groups.mamba_group import MambaGroup
from kv_pool.manager.block_groups.state_chains import StateChains
from kv_pool.manager.prefix_rules import PrefixRules, RuleDetails
from kv_pool.manager.requests.request import SchedulableRequest

DENSE: Final = PrefixRules(retention_interval=None, partial_hits=False)


@mypyc_attr(allow_interpreted_subclasses=False)
class AppliedRules(TableListener):
    """The look-ups of one manager, and the choice of what `PrefixCaching` caches for all its groups.

    Full blocks of windows and states are cached at checkpoints, every N tokens, or all:

    window 4, block size 2, alignment 4; the prompt has 19 tokens, the interval is 0
    tokens   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15 | 16 17 | 18
    cached                                         x       x                    a resend hits 16 tokens

    Args:
        rules: None for a manager that caches all blocks which can serve a hit.
        alignment: tokens; the least common multiple of all block sizes.

    Attributes:
        details: see `RuleDetails`.
        is_dense: whether there are no rules.
        is_partial: whether hits may end within a block.
        has_states: whether a group has states.
        num_reprefillable: see `PrefixRules.num_reprefillable_tokens`.
        caches_junctions: whether states at junctions within a block are cached.
        interval: the retention interval; None to cache all blocks that can serve a hit.
        alignment: as given.
        hit_alignment: tokens; each hit is a multiple of it.
        has_drafter: whether any group's hits drop their last block, for a drafter.
        chains: the cached states as turns of conversations; None without `bounded_states`.
        plans_checkpoints: whether a group saves states in the middle of a step.
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
        self.is_dense: bool = rules is None
        if rules is None:
            rules = DENSE
        self.details: RuleDetails = rules.details
        check_rules(rules, specs, alignment)
        unit = pool.hash_block_size
        self.is_partial: bool = rules.partial_hits and pool.enable_caching and can_hit_parts(specs, unit)
        self.interval: int | None = rules.retention_interval
        self.alignment: int = alignment
        self.hit_alignment: int = unit if self.is_partial else alignment
        self._groups: list[BlockGroup] = groups
        self.has_states: bool = any(isinstance(group, MambaGroup) for group in groups)
        self.num_reprefillable: int = rules.num_reprefillable_tokens
        self.caches_junctions: bool = (
            rules.junction_states and self.is_partial and not rules.num_reprefillable_tokens
        )
        eagle_groups = set(rules.eagle_groups)
        self.has_drafter: bool = len(eagle_groups) > 0
        details = rules.details
        # Blocks of a window that are cached before each boundary; a window of 1 token needs none.
        self._least_hit_blocks: int = 1 if self.is_dense else 0
        self.chains: StateChains | None = StateChains() if rules.bounded_states else None
        self.plans_checkpoints: bool = False
        parts: list[EqualGroups] = []
        for together in list_equal_groups(rules, specs):
            drops_hits = not eagle_groups.isdisjoint(together)
            for group_id in together:
                groups[group_id].drops_hits = drops_hits
            parts.append(EqualGroups([groups[number] for number in together], self.hit_alignment, drops_hits))
        for group in groups:
            if isinstance(group, MambaGroup):
                group.has_drafter = group.drops_hits if details.own_drafter_only else self.has_drafter
                group.hit_alignment = self.hit_alignment
                group.num_recomputed = 0 if details.caches_whole_prompts else 1
                group.counts_most_states = details.counts_most_states
                group.has_rules = not self.is_dense
                if group.checkpoint_alignment:
                    self.plans_checkpoints = True
                    if self.is_dense:
                        raise InvalidArgumentError(
                            "a MambaSpec with prefill_checkpoint_alignment needs prefix_rules, which select "
                            "its states"
                        )
            elif isinstance(group, ChunkedLocalGroup) and group.drops_hits:
                raise InvalidArgumentError(
                    f"group {group.group_id} is in eagle_groups; local attention in chunks cannot drop the "
                    "last block of a hit"
                )
        self.lookup: PrefixLookup = PrefixLookup(parts, len(groups), unit, details.looks_past_limit)

    def set_interval(self, interval: int | None) -> None:
        """Replace the retention interval for blocks that are cached from now on.

        Raises:
            InvalidArgumentError: it is no multiple of the alignment, or not 0 with `bounded_states`.
        """
        check_interval(interval, self.alignment)
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
        if self.is_dense:
            return blocks, num_tokens, 0
        chains = self.chains
        if chains is None:
            return blocks, num_tokens, junction
        if junction:
            last = self.lookup.find_full_block(hashes, junction)
            if last is None or not chains.is_next_turn(last, request.request_id):
                return blocks, num_tokens, junction
        return blocks, num_tokens, self.find_middle(get_num_prompt_tokens(request), num_tokens)

    def note_step(self, request: SchedulableRequest, tables: list[BlockTable], step: Step) -> None:
        """Record states that a step of known tokens leaves within a block, so that they are not cached.

        Drafts are not known yet: after a step with drafts the engine itself saves the state at a block's end.
        """
        if self.is_dense or not self.has_states or self.plans_checkpoints:
            return
        if step.num_scheduled > request.num_tokens:
            return
        for group in self._groups:
            if isinstance(group, MambaGroup) and step.num_before % group.block_size:
                position = step.num_before // group.block_size
                if step.num_scheduled > (position + 1) * group.block_size:
                    tables[group.group_id].unaligned_position = position

    def note_ended(self, request_id: RequestId, tables: Sequence[BlockTable]) -> None:
        """Record where a request has ended."""
        if self.chains is not None and self.lookup.full is not None:
            table = tables[self.lookup.full.first.group_id]
            if table.num_cached_blocks:
                self.chains.note_ended(table.blocks[table.num_cached_blocks - 1])

    def list_step_ends(self, request: SchedulableRequest, num_hit: int, junction: int) -> list[int]:
        """Return the positions after the hit at which the prompt's steps must end to cache their states."""
        if self.is_dense or not self.has_states:
            return []
        num_prompt = get_num_prompt_tokens(request)
        end = self.find_end(num_prompt)
        alignment = self.alignment
        ends = {end, junction // alignment * alignment}
        interval = alignment if self.interval is None else self.interval
        if interval:
            ends.update(range(interval, end, interval))
        return [position for position in sorted(ends) if num_hit < position <= num_prompt]

    def find_prefill_end(self, request: SchedulableRequest) -> int:
        """Return the tokens that a step must reach to save a state on its way; 0 for any step."""
        if not self.plans_checkpoints or self.interval != 0:
            return 0
        return max(get_num_prompt_tokens(request), request.num_tokens - 1)

    # ---- which blocks are cached -------------------------------------------------------------------

    def list_checkpoints(self, num_prompt_tokens: int, junction: int, group: BlockGroup) -> list[int]:
        """Return the positions, in tokens, at which later requests are expected to continue.

        The end of the prompt: for the same prompt, whose last token is computed again, and for a longer one.
        With a drafter, the block before each of them. The junction of a shared prefix, if there is one.
        """
        if self.has_drafter:
            checkpoints = [self.find_end(num_prompt_tokens - 1), self.find_end(num_prompt_tokens)]
        else:
            checkpoints = [num_prompt_tokens - 1]
        if junction:
            checkpoints.append(junction)
            if group.drops_hits and self.details.doubles_junctions:
                checkpoints.append(junction - group.block_size)
        return checkpoints

    def find_end(self, num_prompt_tokens: int) -> int:
        """Return the position of the last checkpoint of a prompt, a multiple of the alignment."""
        unit = self.alignment
        if self.has_drafter:
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
        middle = (num_hit + end) // 2 // self.alignment * self.alignment
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


def check_rules(rules: PrefixRules, specs: tuple[KVCacheSpec, ...], alignment: int) -> None:
    """Raise InvalidArgumentError if the rules do not fit the groups."""
    interval = rules.retention_interval
    if interval:
        if not any(isinstance(spec, (SlidingWindowSpec, MambaSpec)) for spec in specs):
            raise InvalidArgumentError(
                f"retention_interval is {interval}, but no group is a SlidingWindowSpec or a MambaSpec; set "
                "it to 0"
            )
        check_interval(interval, alignment)
    named = {*rules.eagle_groups}
    for together in rules.lookup_groups or ():
        named.update(together)
    wrong = [number for number in named if not 0 <= number < len(specs)]
    if wrong:
        raise InvalidArgumentError(f"there is no group {min(wrong)}; there are {len(specs)}")
    if rules.eagle_groups and alignment <= rules.num_reprefillable_tokens:
        raise InvalidArgumentError(
            f"num_reprefillable_tokens is {rules.num_reprefillable_tokens}; hits drop {alignment} tokens, "
            "which must be more"
        )


def check_interval(interval: int | None, alignment: int) -> None:
    """Raise InvalidArgumentError if the retention interval is no multiple of the alignment."""
    if interval is not None and (interval < 0 or interval % alignment):
        raise InvalidArgumentError(
            f"retention_interval is {interval}; it must be a multiple of {alignment}, the least common "
            "multiple of the block sizes"
        )


def can_hit_parts(specs: tuple[KVCacheSpec, ...], unit: int) -> bool:
    """Return True if hits can end within a block: some state has larger blocks, and all groups allow it.

    Args:
        unit: tokens per hash.
    """
    if len(specs) == 1 or not any(isinstance(spec, MambaSpec) and spec.block_size > unit for spec in specs):
        return False
    for spec in specs:
        if spec.is_cacheable and spec.block_size != unit and not spec.has_partial_hits:
            return False
    return True


def list_equal_groups(rules: PrefixRules, specs: tuple[KVCacheSpec, ...]) -> list[list[GroupId]]:
    """Return the groups to look up together, in the order of their first group."""
    if rules.lookup_groups is not None:
        listed = [[GroupId(number) for number in together] for together in rules.lookup_groups]
        numbers = sorted([number for together in listed for number in together])
        cacheable = [number for number, spec in enumerate(specs) if spec.is_cacheable]
        if numbers != cacheable:
            raise InvalidArgumentError(
                f"lookup_groups lists the groups {numbers}; each of {cacheable} must be listed once"
            )
        return listed
    equal: dict[KVCacheSpec, list[GroupId]] = {}
    for number, spec in enumerate(specs):
        if spec.is_cacheable:
            equal.setdefault(spec, []).append(GroupId(number))
    return list(equal.values())


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
