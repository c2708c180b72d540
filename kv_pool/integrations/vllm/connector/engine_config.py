"""vLLM's configuration decides whether the tiers serve an engine, its groups' keys and its blocks' sizes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import vllm
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes, resolve_none_hash_seed
from vllm.v1.kv_cache_interface import (
    KVCacheSpecKind,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    iter_layer_specs,
)

from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import GroupId
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.storage.segments import Segment, SegmentTable
from kv_pool.storage.tensors import find_device
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.tier_prefixes import GroupKeys

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
        skip: Callable[[int], int] | None = None
        if kind is KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION:
            chunk = max(layer.attention_chunk_size for layer in iter_layer_specs(spec))
            skip = partial(_skip_chunks, chunk)
        elif kind in _WINDOW:
            skip = partial(_skip_window, get_kv_cache_spec_sliding_window(spec))
        stride = spec.block_size // hash_block_size
        groups.append(GroupKeys(GroupId(group_id), spec.block_size, stride, skip))
    return groups, alignment


def _skip_window(window: int, num_tokens: int) -> int:
    """Return how many tokens are outside the window of the next one."""
    return max(0, num_tokens - window + 1)


def _skip_chunks(chunk: int, num_tokens: int) -> int:
    """Return how many tokens are in chunks before that of the next one."""
    return num_tokens - num_tokens % chunk


def count_block_bytes(kv_cache_config: Any) -> int:
    """Return the bytes of one block of one rank, all layers.

    All entries of vLLM's `kv_cache_tensors` place layers in one allocation, whose size each of them has.
    """
    return int(kv_cache_config.kv_cache_tensors[0].size) // int(kv_cache_config.num_blocks)


def wrap_caches(kv_caches: Mapping[str, Any], kv_cache_config: Any, block_format: str) -> BlockStorage:
    """Return a storage over the tensors that vLLM's worker registers.

    A block has the bytes of all layers at its id. The layers of several groups may be in the same bytes,
    because a block id belongs to one group at a time.

    Args:
        kv_caches: tensors by layer; the placement is taken from `kv_cache_config`.
        block_format: see `BlockStorage`.
    Raises:
        InvalidArgumentError: the tensors do not contain the bytes that the configuration places there.
    """
    num_blocks = kv_cache_config.num_blocks
    tables: list[SegmentTable] = []
    device = ""
    owners: dict[int, Any] = {}
    for placed in kv_cache_config.kv_cache_tensors:
        name = next((layer for layer in placed.layers if layer in kv_caches), None)
        if name is None:
            raise InvalidArgumentError(
                f"none of the layers {', '.join(placed.layers)} is among the {len(kv_caches)} registered KV "
                "caches"
            )
        cache = kv_caches[name]
        if isinstance(cache, list | tuple):  # such as the states of a Mamba layer, in one allocation
            cache = cache[0]
        memory = cache.untyped_storage()
        owner = owners.setdefault(memory.data_ptr(), cache)
        device = find_device(cache)
        rows = _list_rows(placed, num_blocks, memory.data_ptr(), owner)
        end = max(row.base_address + (num_blocks - 1) * row.stride_bytes + row.span_bytes for row in rows)
        if end - memory.data_ptr() > memory.nbytes():
            raise InvalidArgumentError(
                f"the KV cache of {name} has {memory.nbytes()} bytes; its configuration places blocks in "
                f"{end - memory.data_ptr()}"
            )
        tables.append(SegmentTable.from_segments(rows, num_blocks))
    table = SegmentTable.overlay(tables)
    num_placed = count_block_bytes(kv_cache_config)
    if table.block_bytes > num_placed:
        raise InvalidArgumentError(
            f"a block of the registered KV caches has {table.block_bytes} bytes; {num_placed} are allocated"
        )
    return BlockStorage(table, device, block_format)


def describe_bytes(kv_cache_config: Any) -> str:
    """Return a description of a block's bytes: equal for blocks that can be exchanged."""
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        fields = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "page_size_bytes")
        known = [f"{name}={getattr(spec, name)}" for name in fields if hasattr(spec, name)]
        groups.append(f"{len(group.layer_names)} x {type(spec).__name__}({', '.join(known)})")
    return f"{kv_cache_config.kv_cache_layout} {'; '.join(groups)}"


def _list_rows(placed: Any, num_blocks: int, address: int, owner: Any) -> list[Segment]:
    """Return the segments of the layers that one entry of `kv_cache_tensors` places.

    layers outermost    |layer 0: b0 b1 ...|layer 1: b0 b1 ...|   one segment per layer
    blocks outermost    |b0: layer 0, layer 1|b1: layer 0, layer 1|   one segment
    """
    stride = placed.block_stride
    if placed.layer_stride < num_blocks * stride:
        return [Segment(address, stride, stride, owner)]
    # In some layouts a layer is split further, by groups of heads.
    num_parts = len(placed.layers) * placed.layer_stride // (num_blocks * stride)
    first = address + placed.offset
    return [Segment(first + part * num_blocks * stride, stride, stride, owner) for part in range(num_parts)]


def describe_blocks(vllm_config: Any, storage: BlockStorage, block_size: int, weights: str) -> BlockLayout:
    """Return what must be equal in two engines for one to use the blocks of the other.

    Raises:
        InvalidArgumentError: the hashes of this engine cannot be reproduced by another one.
    """
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("sha256") and "PYTHONHASHSEED" not in os.environ:
        raise InvalidArgumentError(
            f"block hashes of the algorithm {algorithm} have a random seed, so blocks on disk would be "
            "useless after a restart. Set PYTHONHASHSEED to a number, use "
            "--prefix-caching-hash-algo sha256_cbor, or remove disk_bytes"
        )
    seed = resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
    return BlockLayout(
        block_format=storage.block_format,
        block_bytes=storage.block_bytes,
        block_size=block_size,
        # The extra keys in hashes, such as those of images and adapters, differ between versions.
        hash_algorithm=f"{algorithm} of vLLM {vllm.__version__}",
        hash_seed=hashlib.sha256(seed.encode()).hexdigest()[:16],
        model=vllm_config.model_config.model,
        weights=weights or vllm_config.model_config.revision or "",
    )


def open_disk_tier(folder: str, capacity: int, layout: BlockLayout, parallel_config: Any) -> DiskTier:
    """Open the disk tier of this rank, in its own folder below `folder`.

    Engines of different models, layouts or weights have different folders. Two engines with the same layout
    cannot have the same folder open, except as data-parallel engines, which have one each.

    Raises:
        TierError: the folder cannot be used, see `DiskTier`.
    """
    name = layout.get_fingerprint()
    # The index is the only field that vLLM leaves set in the engines of a dense model.
    if parallel_config.data_parallel_index:
        name += f"-engine{parallel_config.data_parallel_index}"
    path = Path(folder, f"{name}-rank{parallel_config.rank}of{parallel_config.world_size}")
    # Every read verifies its block; reading all of them now would delay the start.
    return DiskTier(path, capacity, layout, verifies=False)
