"""`AppliedRules`: what the groups of one manager look up and cache, by its `PrefixRules` or without any."""

from collections.abc import Sequence
from typing import Any, Final

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import as_int, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHash, GroupId, RequestId
from kv_pool.manager.block_groups.block_group import BlockGroup, ChunkedLocalGroup
from kv_pool.manager.block_groups.block_table import BlockTable, TableListener
from kv_pool.manager.block_groups.kv_cache_spec import KVCacheSpec, MambaSpec, SlidingWindowSpec
from kv_pool.manager.block_groups.mamba_group import MambaGroup
from kv_pool.manager.block_groups.state_chains import StateChains
from kv_pool.manager.block_groups.step import Step
from kv_pool.manager.checkpoint_choice import CheckpointChoice
from kv_pool.manager.prefix_lookup import EqualGroups, PrefixLookup
from kv_pool.manager.prefix_rules import PrefixRules
from kv_pool.manager.requests.request import SchedulableRequest

DENSE: Final = PrefixRules(retention_interval=None, partial_hits=False)


@mypyc_attr(allow_interpreted_subclasses=False)
class AppliedRules(TableListener):
    """The look-ups of one manager, and the choice of what `PrefixCaching` caches for all its groups.

    Args:
        rules: None for a manager that caches all blocks which can serve a hit.
        alignment: tokens; the least common multiple of all block sizes.

    Attributes:
        rules: the rules; `DENSE` without any.
        is_dense: whether there are no rules.
        is_partial: whether hits may end within a block.
        has_states: whether a group has states.
        num_reprefillable: see `PrefixRules.num_reprefillable_tokens`.
        caches_junctions: whether states at junctions within a block are cached.
        full_group_beside_states: the first group with full attention in a manager with states; -1 for none.
        choice: the `CheckpointChoice`, which selects the blocks to cache.
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
        self.rules: PrefixRules = rules
        check_rules(rules, specs, alignment)
        unit = pool.hash_block_size
        self.is_partial: bool = rules.partial_hits and pool.enable_caching and can_hit_parts(specs, unit)
        hit_alignment = unit if self.is_partial else alignment
        self._groups: list[BlockGroup] = groups
        self.has_states: bool = any(isinstance(group, MambaGroup) for group in groups)
        self.num_reprefillable: int = rules.num_reprefillable_tokens
        self.caches_junctions: bool = (
            rules.junction_states and self.is_partial and not rules.num_reprefillable_tokens
        )
        eagle_groups = set(rules.eagle_groups)
        has_drafter = len(eagle_groups) > 0
        details = rules.details
        self.choice: CheckpointChoice = CheckpointChoice(
            rules.retention_interval,
            alignment,
            hit_alignment,
            has_drafter,
            details.doubles_junctions,
            least_hit_blocks=1 if self.is_dense else 0,
        )
        self.chains: StateChains | None = StateChains() if rules.bounded_states else None
        self.plans_checkpoints: bool = False
        parts: list[EqualGroups] = []
        for together in list_equal_groups(rules, specs):
            drops_hits = not eagle_groups.isdisjoint(together)
            for group_id in together:
                groups[group_id].drops_hits = drops_hits
            parts.append(EqualGroups([groups[number] for number in together], hit_alignment, drops_hits))
        for group in groups:
            if isinstance(group, MambaGroup):
                group.has_drafter = group.drops_hits if details.own_drafter_only else has_drafter
                group.hit_alignment = hit_alignment
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
        self.full_group_beside_states: int = -1
        if self.has_states and self.lookup.full is not None:
            self.full_group_beside_states = self.lookup.full.group_ids[0]

    def set_interval(self, interval: int | None) -> None:
        """Replace the retention interval for blocks that are cached from now on.

        Raises:
            InvalidArgumentError: it is no multiple of the alignment, or not 0 with `bounded_states`.
        """
        check_interval(interval, self.choice.alignment)
        if self.chains is not None and interval != 0:
            raise InvalidArgumentError(f"retention_interval is {interval}; bounded_states needs 0")
        self.choice.interval = interval

    def find_prefix(
        self, request: SchedulableRequest, hashes: list[BlockHash], max_num_tokens: int
    ) -> tuple[list[list[KVCacheBlock]], int, int]:
        """Return the blocks of the longest prefix by group, its tokens, and a further checkpoint; 0 for none.

        The checkpoint is the junction of a shared prefix. With `bounded_states`, it is not kept for the next
        turn of a conversation, and the middle of a prompt takes its place.
        """
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
        return blocks, num_tokens, self.choice.find_middle(get_num_prompt_tokens(request), num_tokens)

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
        end = self.choice.find_end(num_prompt)
        alignment = self.choice.alignment
        ends = {end, junction // alignment * alignment}
        interval = alignment if self.choice.interval is None else self.choice.interval
        if interval:
            ends.update(range(interval, end, interval))
        return [position for position in sorted(ends) if num_hit < position <= num_prompt]

    def find_prefill_end(self, request: SchedulableRequest) -> int:
        """Return the tokens that a step must reach to save a state on its way; 0 for any step."""
        if not self.plans_checkpoints or self.choice.interval != 0:
            return 0
        return max(get_num_prompt_tokens(request), request.num_tokens - 1)


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


def get_num_prompt_tokens(request: SchedulableRequest) -> int:
    """Return the tokens of the request's prompt. Raise InvalidTypeError if it does not count them."""
    unchecked: Any = request
    try:
        num_prompt = unchecked.num_prompt_tokens
    except AttributeError:
        refuse_type("request", request, "a request with num_prompt_tokens, which prefix_rules need")
    return num_prompt if isinstance(num_prompt, int) else as_int("num_prompt_tokens", num_prompt)
