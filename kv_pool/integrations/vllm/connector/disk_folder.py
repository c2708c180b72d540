"""The disk tier of a rank: its folder, and what blocks must have in common to be used again."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import vllm
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from kv_pool.errors import InvalidArgumentError
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.disk_tier import DiskTier


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
