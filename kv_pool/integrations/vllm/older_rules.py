"""`RULES_0_30`, `RULES_0_31`, `RULES_0_32`: what the managers of these releases cache and find. No vLLM."""

from dataclasses import replace

from kv_pool.manager.prefix_rules import RuleDetails

RULES_0_32 = RuleDetails(doubles_junctions=False, renews_states=True)
RULES_0_31 = replace(RULES_0_32, looks_past_limit=False, caches_whole_prompts=True, ends_within_blocks=True)
RULES_0_30 = replace(RULES_0_31, own_drafter_only=True, counts_most_states=True)
