"""`read_groups`, `check_served`: vLLM's KV cache groups as ours, or why level `manager` cannot serve them.

Imports vLLM; see `plugin`.
"""

import os
from collections.abc import Callable
from math import lcm
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec as VllmCrossAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kv_pool.environment import STATES
from kv_pool.ids import GroupId
from kv_pool.manager.block_groups.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kv_pool.manager.prefix_rules import PrefixRules, RuleDetails


class NotServedError(Exception):
    """A feature of vLLM that level `manager` does not serve; the message names it."""


def _read_window(spec: Any) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=spec.block_size,
        sliding_window=spec.sliding_window,
        extra_retained_tokens=spec.extra_retained_tokens,
    )


def _read_states(spec: Any) -> KVCacheSpec:
    is_aligned = spec.mamba_cache_mode == "align"
    saves = is_aligned and spec.num_prefill_checkpoint_blocks > 0
    return MambaSpec(
        block_size=spec.block_size,
        num_speculative_blocks=spec.num_speculative_blocks,
        has_states_at_block_ends=is_aligned,
        prefill_checkpoint_alignment=spec.prefill_checkpoint_alignment if saves else None,
    )


# By the class that vLLM itself would use for a group: a registered class of someone else is not served.
READERS: dict[type, Callable[[Any], KVCacheSpec]] = {
    FullAttentionManager: lambda spec: FullAttentionSpec(block_size=spec.block_size),
    SlidingWindowManager: _read_window,
    ChunkedLocalAttentionManager: lambda spec: ChunkedLocalAttentionSpec(
        block_size=spec.block_size, attention_chunk_size=spec.attention_chunk_size
    ),
    MambaManager: _read_states,
    CrossAttentionManager: lambda spec: CrossAttentionSpec(block_size=spec.block_size),
}


def list_eagle_groups(config: Any, use_eagle: bool) -> list[GroupId]:
    """Return the groups that a drafter reads: those that are marked, or else all if there is a drafter."""
    groups = list(enumerate(config.kv_cache_groups))
    marked = [GroupId(group_id) for group_id, group in groups if group.is_eagle_group]
    return marked or [GroupId(group_id) for group_id, _ in groups if use_eagle]


def read_groups(config: Any) -> list[KVCacheSpec]:
    """Return our specification of each group of a `KVCacheConfig`. Raise NotServedError if one has none."""
    groups = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        manager_class = KVCacheSpecRegistry.get_manager_class(spec, group.role)
        read = None if manager_class is None else READERS.get(manager_class)
        if read is None:
            name = "nothing" if manager_class is None else manager_class.__name__
            raise NotServedError(f"a KV cache group of {type(spec).__name__}, which vLLM serves by {name}")
        groups.append(read(spec))
    return groups


def read_rules(
    config: Any,
    *,
    use_eagle: bool,
    num_prefill_lookahead: int,
    has_junction_states: bool,
    details: RuleDetails,
) -> PrefixRules:
    """Return the rules of prefix caching that vLLM's manager follows with these options."""
    groups = config.kv_cache_groups
    eagle_groups = list_eagle_groups(config, use_eagle)
    equal: list[list[int]] = []
    for number, group in enumerate(groups):
        if isinstance(group.kv_cache_spec, VllmCrossAttentionSpec):
            continue
        for together in equal:
            if groups[together[0]].kv_cache_spec == group.kv_cache_spec:
                together.append(number)
                break
        else:
            equal.append([number])
    return PrefixRules(
        retention_interval=config.prefix_cache_retention_interval,
        eagle_groups=eagle_groups if use_eagle else (),
        num_reprefillable_tokens=max(0, num_prefill_lookahead - 1),
        junction_states=has_junction_states and bool(eagle_groups),
        bounded_states=os.environ.get(STATES) == "bounded",
        lookup_groups=equal,
        details=details,
    )


def check_served(options: dict[str, Any], release: tuple[int, int]) -> None:
    """Raise NotServedError for the first option of vLLM's manager that level `manager` does not serve.

    Also for options that vLLM refuses: its own manager then raises its own error.

    Args:
        options: the arguments of the manager's constructor, by name.
        release: vLLM's, such as (0, 33).
    """
    config, scheduler_block_size = options["kv_cache_config"], options["scheduler_block_size"]
    hash_block_size, use_eagle = options["hash_block_size"], options["use_eagle"]
    num_prefill_lookahead = options["num_prefill_lookahead"]
    if release < (0, 32) and any(
        getattr(group.kv_cache_spec, "num_prefill_checkpoint_blocks", 0) for group in config.kv_cache_groups
    ):
        raise NotServedError("Mamba states that are saved in the middle of a step")
    if release < (0, 33) and not use_eagle and list_eagle_groups(config, use_eagle=False):
        raise NotServedError("a drafter's groups without EAGLE")  # vLLM marks none then
    groups = read_groups(config)
    if options["dcp_world_size"] > 1 or options["pcp_world_size"] > 1:
        raise NotServedError("context parallelism (DCP or PCP)")
    if not groups:
        raise NotServedError("a model without KV cache groups")
    for group in config.kv_cache_groups:
        if group.host_resident:
            raise NotServedError("groups in host memory (HiSparse)")
        if not group.kv_cache_spec.prefix_cacheable:
            raise NotServedError(f"{type(group.kv_cache_spec).__name__}, which is not cached")
    if any(scheduler_block_size % spec.block_size for spec in groups):
        raise NotServedError(f"a scheduler block size of {scheduler_block_size}")
    interval = config.prefix_cache_retention_interval
    has_checkpoints = any(isinstance(spec, (SlidingWindowSpec, MambaSpec)) for spec in groups)
    if interval and (interval < 0 or interval % scheduler_block_size or not has_checkpoints):
        raise NotServedError(f"a retention interval of {interval}")
    states = os.environ.get(STATES, "")
    if states not in ("", "checkpoints", "bounded"):
        raise NotServedError(f"{STATES}={states}, which is neither checkpoints nor bounded")
    if states == "bounded" and interval != 0:
        raise NotServedError(f"{STATES}=bounded with a retention interval of {interval}, not 0")
    if not options["enable_caching"]:
        return
    if any(isinstance(spec, CrossAttentionSpec) for spec in groups):
        raise NotServedError("prefix caching beside cross-attention")
    if any(isinstance(spec, MambaSpec) and not spec.has_states_at_block_ends for spec in groups):
        raise NotServedError("prefix caching of Mamba states in another mode than align")
    sizes = sorted({spec.block_size for spec in groups})
    if any(size % hash_block_size for size in sizes) or (len(groups) == 1 and sizes != [hash_block_size]):
        raise NotServedError(f"block sizes {sizes} with hashes of {hash_block_size} tokens")
    if scheduler_block_size != lcm(*sizes):
        raise NotServedError(f"block sizes {sizes} with a scheduler block size of {scheduler_block_size}")
    if any(isinstance(spec, ChunkedLocalAttentionSpec) for spec in groups) and (use_eagle or len(sizes) > 1):
        raise NotServedError("prefix caching of chunked local attention with EAGLE or several block sizes")
    eagle_groups = list_eagle_groups(config, use_eagle)
    if eagle_groups and num_prefill_lookahead > scheduler_block_size:
        raise NotServedError(f"{num_prefill_lookahead} draft tokens with blocks of {scheduler_block_size}")
    if (
        use_eagle
        and num_prefill_lookahead > 1
        and any(
            isinstance(groups[group_id], MambaSpec) and groups[group_id].block_size > hash_block_size
            for group_id in eagle_groups
        )
    ):
        # vLLM's manager then caches the state after later tokens under the hash of earlier ones.
        raise NotServedError(
            f"a drafter with {num_prefill_lookahead} modules whose groups have Mamba states and finer hashes"
        )
