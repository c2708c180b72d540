"""The configurations of vLLM that the tiers serve, and the keys of their groups."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    KVCacheSpecKind,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    iter_layer_specs,
)

from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import GroupId
from kv_pool.integrations.vllm.connector.group_keys import GroupKeys

_FULL = {
    KVCacheSpecKind.FULL_ATTENTION,
    KVCacheSpecKind.MLA_ATTENTION,
    KVCacheSpecKind.SINK_FULL_ATTENTION,
}
_WINDOW = {KVCacheSpecKind.SLIDING_WINDOW, KVCacheSpecKind.SLIDING_WINDOW_MLA}


def list_obstacles(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Return the reasons why the tiers cannot serve a configuration, one clause each; [] if they can."""
    parallel = vllm_config.parallel_config
    obstacles = []
    if not vllm_config.cache_config.enable_prefix_caching:
        obstacles.append("prefix caching is off, so blocks have no hashes")
    if parallel.pipeline_parallel_size > 1:
        obstacles.append("pipeline parallelism gives ranks blocks of different sizes")
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        obstacles.append("context parallelism distributes the tokens of a block over ranks")
    if not kv_cache_config.kv_cache_tensors:
        obstacles.append("the KV cache has no tensors")
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        kind = get_kv_cache_spec_kind(group.kv_cache_spec)
        if kind not in _FULL | _WINDOW | {KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION}:
            obstacles.append(f"KV cache group {group_id} is of the kind {kind.value}")
        elif group_id not in kv_cache_config.prefix_cacheable_group_ids:
            obstacles.append(f"KV cache group {group_id} has no prefix cache")
    return obstacles


def describe_groups(vllm_config: Any, kv_cache_config: Any) -> tuple[list[GroupKeys], int]:
    """Return the keys of each group, and the number of tokens that hits are a multiple of.

    Raises:
        InvalidArgumentError: the tiers cannot serve this configuration.
    """
    obstacles = list_obstacles(vllm_config, kv_cache_config)
    if obstacles:
        raise InvalidArgumentError(
            f"KVPoolConnector cannot serve this engine: {'; '.join(obstacles)}. Remove host_bytes from "
            "kv_connector_extra_config to run it without tiers"
        )
    alignment, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    groups = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        kind = get_kv_cache_spec_kind(spec)
        chunk = None
        if kind is KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION:
            chunk = max(layer.attention_chunk_size for layer in iter_layer_specs(spec))
        groups.append(
            GroupKeys(
                GroupId(group_id),
                spec.block_size,
                spec.block_size // hash_block_size,
                get_kv_cache_spec_sliding_window(spec) if kind in _WINDOW else None,
                chunk,
            )
        )
    return groups, alignment
