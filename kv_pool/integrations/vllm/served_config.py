"""`read_groups`: vLLM's KV cache groups as ours, or the reason why level `manager` cannot serve them.

Imports vLLM; see `plugin`.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    FullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kv_pool.manager.block_groups.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)


class NotServedError(Exception):
    """A feature of vLLM that level `manager` does not serve; the message names it."""


def _read_full(spec: Any) -> KVCacheSpec:
    return FullAttentionSpec(block_size=spec.block_size)


def _read_window(spec: Any) -> KVCacheSpec:
    if spec.extra_retained_tokens:
        raise NotServedError(f"a window that retains {spec.extra_retained_tokens} tokens more")
    return SlidingWindowSpec(block_size=spec.block_size, sliding_window=spec.sliding_window)


def _read_chunked(spec: Any) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(
        block_size=spec.block_size, attention_chunk_size=spec.attention_chunk_size
    )


def _read_cross(spec: Any) -> KVCacheSpec:
    return CrossAttentionSpec(block_size=spec.block_size)


# By the class that vLLM itself would use for a group: a registered class of someone else is not served.
READERS: dict[type, Callable[[Any], KVCacheSpec]] = {
    FullAttentionManager: _read_full,
    SlidingWindowManager: _read_window,
    ChunkedLocalAttentionManager: _read_chunked,
    CrossAttentionManager: _read_cross,
}


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


def check_served(
    config: Any,
    groups: list[KVCacheSpec],
    *,
    enable_caching: bool,
    scheduler_block_size: int,
    hash_block_size: int,
    dcp_world_size: int,
    pcp_world_size: int,
    use_eagle: bool,
    num_prefill_lookahead: int,
) -> None:
    """Raise NotServedError for the first option of vLLM's manager that level `manager` does not serve."""
    if dcp_world_size > 1 or pcp_world_size > 1:
        raise NotServedError("context parallelism (DCP or PCP)")
    if not groups:
        raise NotServedError("a model without KV cache groups")
    for group in config.kv_cache_groups:
        if group.host_resident:
            raise NotServedError("groups in host memory (HiSparse)")
    if not enable_caching:
        return
    if any(isinstance(spec, CrossAttentionSpec) for spec in groups):
        raise NotServedError("prefix caching beside cross-attention")
    if use_eagle:
        raise NotServedError("EAGLE with prefix caching")
    if num_prefill_lookahead > 1:
        raise NotServedError("prefix caching with several speculative modules (MTP)")
    block_sizes = {spec.block_size for spec in groups}
    if any(size % hash_block_size for size in block_sizes):
        raise NotServedError(f"block sizes {sorted(block_sizes)} with hashes of {hash_block_size} tokens")
    interval = config.prefix_cache_retention_interval
    if interval is not None and any(isinstance(spec, SlidingWindowSpec) for spec in groups):
        raise NotServedError(f"a retention interval of {interval}")
