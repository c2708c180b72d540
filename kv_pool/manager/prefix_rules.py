"""`PrefixRules`: which blocks of windows and states a manager caches, and how hits with drafters end."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kv_pool.core.arguments import as_count, as_ints, check_type
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import GroupId
from kv_pool.manager.block_groups.kv_cache_spec import KVCacheSpec, MambaSpec, SlidingWindowSpec


@dataclass(frozen=True, kw_only=True)
class RuleDetails:
    """The defaults are those of vLLM 0.33. An engine with the rules of an older release sets the others.

    Attributes:
        doubles_junctions: with a drafter, cache the block before that at a junction, too. From 0.33 on.
        renews_states: a state that is cached again under the same key counts as unwritten again: requests
            that hit it wait for the next step. Until 0.32.
        looks_past_limit: the block that a hit drops for a drafter may lie behind the longest hit that the
            request may have. From 0.32 on.
        caches_whole_prompts: the end of a prompt is cached with its last token, although the same prompt does
            not hit it. Until 0.31.
        ends_within_blocks: the state at the end of a prompt is cached, apart from what `retention_interval`
            selects, only if the prompt ends within a block. Until 0.31.
        own_drafter_only: the state at the end of a prompt lies one hash before it only if hits of its own
            group drop blocks, not if those of any group do. Until 0.30.
        counts_most_states: a step that takes a block for a state needs as many free blocks as such a step
            takes at most. Until 0.30.
    """

    doubles_junctions: bool = True
    renews_states: bool = False
    looks_past_limit: bool = True
    caches_whole_prompts: bool = False
    ends_within_blocks: bool = False
    own_drafter_only: bool = False
    counts_most_states: bool = False


NEWEST_DETAILS = RuleDetails()


@dataclass(frozen=True, kw_only=True)
class PrefixRules:
    """Selects the blocks that a `KVCacheManager` caches for later hits; by default those of vLLM 0.33.

        >>> from kv_pool import BlockPool, KVCacheManager
        >>> from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec
        >>> from kv_pool.manager.prefix_rules import PrefixRules
        >>> groups = [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=8)]
        >>> manager = KVCacheManager(BlockPool(20, True, 4), groups=groups, prefix_rules=PrefixRules())

    Attributes:
        retention_interval: which prefixes sliding windows and states can be hit at. 0: only at checkpoints,
            which are the end of a prompt and the junctions of shared prefixes. N: also every N tokens, a
            multiple of the manager's alignment. None: at each multiple of the alignment. Other groups cache
            every block. vLLM: `CacheConfig.prefix_cache_retention_interval`.
        eagle_groups: indices of the groups with layers of an EAGLE or MTP drafter. Their hits drop the last
            block, whose hidden states the drafter needs.
        num_reprefillable_tokens: tokens before the end of a sequence whose KV a drafter with several modules
            may write again; they are not cached yet.
        partial_hits: hits may end within a block, at a multiple of the pool's `hash_block_size`, if there is
            a `MambaSpec` group with larger blocks and all other groups allow it. The new request gets a copy
            of the block: see `take_block_copies`.
        junction_states: cache the state at the junction of a shared prefix also within a block; with
            `partial_hits` only. vLLM: `enable_mamba_shared_prefix_checkpoint`, if it has a drafter.
        bounded_states: bound the states that requests leave cached; with a `retention_interval` of 0 only.
            A prompt that is mostly new keeps the state in its middle, too, so that the second request with
            a shared prefix usually hits a part of it; a junction replaces the middle. A request so keeps at
            most two states. A conversation keeps the ends of its last two turns: an older one is released,
            unless several requests continued from it. Hits within blocks do not count as turns.
        lookup_groups: groups that are looked up together, as lists of indices. Default: groups with equal
            specs.
        details: what differs from vLLM 0.33, for an engine with the rules of an older release.
    """

    retention_interval: int | None = 0
    eagle_groups: Iterable[int] = ()
    num_reprefillable_tokens: int = 0
    partial_hits: bool = True
    junction_states: bool = False
    bounded_states: bool = False
    lookup_groups: Iterable[Iterable[int]] | None = field(default=None)
    details: RuleDetails = NEWEST_DETAILS

    def __post_init__(self) -> None:
        for name in ("retention_interval", "num_reprefillable_tokens"):
            value = getattr(self, name)
            if value is not None or name != "retention_interval":
                check_type(name, value, int)
                as_count(name, value)
        check_type("partial_hits", self.partial_hits, bool)
        check_type("junction_states", self.junction_states, bool)
        check_type("bounded_states", self.bounded_states, bool)
        check_type("details", self.details, RuleDetails)
        if self.bounded_states and self.retention_interval != 0:
            raise InvalidArgumentError(
                f"retention_interval is {self.retention_interval}; bounded_states needs 0, or the interval's "
                "states have no bound"
            )
        object.__setattr__(
            self, "eagle_groups", tuple(sorted(set(as_ints("eagle_groups", self.eagle_groups))))
        )
        if self.lookup_groups is not None:
            listed = tuple(tuple(as_ints("lookup_groups", group)) for group in self.lookup_groups)
            object.__setattr__(self, "lookup_groups", listed)


# ---- whether rules fit the groups of a manager ---------------------------------------------------


def check_rules(rules: PrefixRules, specs: tuple[KVCacheSpec, ...], alignment: int) -> None:
    """Raise InvalidArgumentError if the rules do not fit the groups."""
    interval = rules.retention_interval
    if interval and not any(isinstance(spec, (SlidingWindowSpec, MambaSpec)) for spec in specs):
        raise InvalidArgumentError(
            f"retention_interval is {interval}, but no group is a SlidingWindowSpec or a MambaSpec; set it "
            "to 0"
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
