"""`RuleDetails`: details of `PrefixRules` in which the releases of vLLM differ."""

from dataclasses import dataclass


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
