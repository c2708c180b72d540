"""`make_prefix_rules`: where a replay keeps the states of Mamba groups and the blocks of windows."""

from typing import Final

from kv_pool.manager.prefix_rules import PrefixRules

STATES: Final = ("steps", "blocks", "checkpoints", "bounded")
"""The rules for where states and windows stay cached.

    steps        at the end of each step
    blocks       at the end of each block; each step computes one block
    checkpoints  at the end of each prompt and where shared prefixes end: vLLM 0.33's default
    bounded      as checkpoints, also in the middle of new prompts, and at most the ends of two turns
"""


def make_prefix_rules(states: str) -> PrefixRules | None:
    """Return the manager's rules for one of `STATES`; None for its default, which caches all it can."""
    if states == "checkpoints":
        return PrefixRules(retention_interval=0)
    if states == "bounded":
        return PrefixRules(retention_interval=0, bounded_states=True)
    return None
