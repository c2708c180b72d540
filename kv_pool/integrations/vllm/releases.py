"""The releases of vLLM: what kv_pool replaces, what was tested, and how each differs from the newest.

Imports no vLLM. `RULES` is what the managers of the releases cache and find. For what else differs, the code
compares the number of the release: `pool_classes`, `manager_classes` and `served_config`.
"""

import importlib
from copy import copy
from dataclasses import replace
from typing import Any

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_pool import BlockPool
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHashWithGroupId, GroupId
from kv_pool.manager.prefix_rules import NEWEST_DETAILS, RuleDetails

# Level -> version without local part ("0.33.0" includes 0.33.0+cpu) -> the day it was tested.
# `tests/integrations/check_vllm_release.py VERSION` tests a version and adds it.
CHECKED_VERSIONS = {
    "pool": {
        "0.30.0": "2026-11-23",
        "0.31.0": "2026-11-23",
        "0.32.0": "2026-11-23",
        "0.33.0": "2026-11-21",
    },
    "manager": {
        "0.30.0": "2026-11-23",
        "0.31.0": "2026-11-23",
        "0.32.0": "2026-11-23",
        "0.33.0": "2026-11-23",
    },
}

# The replaced classes of level `pool`, by the vLLM module that defines them.
POOL_LEVEL: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.block_pool": ("BlockPool", "BlockHashToBlockMap"),
    "vllm.v1.core.kv_cache_utils": ("KVCacheBlock", "FreeKVCacheBlockQueue"),
    "vllm.v1.core.kv_cache_metrics": ("KVCacheMetricsCollector", "BlockMetricsState"),
}
# Level -> the replaced classes; the same ones in each release.
REPLACED = {
    "pool": POOL_LEVEL,
    "manager": POOL_LEVEL | {"vllm.v1.core.kv_cache_manager": ("KVCacheManager", "KVCacheBlocks")},
}

# Newest first. A release needs an entry only if kv_pool's classes for it differ from those of the one before.
_RULES_0_32 = RuleDetails(doubles_junctions=False, renews_states=True)
_RULES_0_31 = replace(_RULES_0_32, looks_past_limit=False, caches_whole_prompts=True, ends_within_blocks=True)
RULES = {
    (0, 33): NEWEST_DETAILS,
    (0, 32): _RULES_0_32,
    (0, 31): _RULES_0_31,
    (0, 30): replace(_RULES_0_31, own_drafter_only=True, counts_most_states=True),
}


def is_checked(level: str, version: str) -> bool:
    """Return True if any build of this version was tested at this level."""
    return version.partition("+")[0] in CHECKED_VERSIONS.get(level, {})


def find_release(version: str) -> tuple[int, int]:
    """Return the newest known release that is not newer than `version`: (0, 33) for 0.33.1.

    For an older version, return the oldest; for one without numbers, such as `dev`, the newest.
    """
    known = list(RULES)
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()):
        return known[0]
    number = int(major), int(minor)
    return next((release for release in known if release <= number), known[-1])


def load_classes(level: str) -> dict[str, Any]:
    """Return kv_pool's classes for this level of the installed release, by vLLM's names. Imports vLLM."""
    modules = [importlib.import_module("kv_pool.integrations.vllm.pool_classes")]
    if level == "manager":
        modules.append(importlib.import_module("kv_pool.integrations.vllm.manager_classes"))
    return {name: thing for module in modules for name, thing in module.CLASSES.items()}


class PartialBlocksOnly(BlockPool):
    """A pool that refuses to cache a full block as a partial one, as vLLM until 0.31 does.

    Attributes:
        last_feature_only: events of partial blocks name only the last multimodal input, as in vLLM 0.30.
    """

    last_feature_only = False

    def cache_partial_block(
        self,
        request: Any,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: GroupId,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> BlockHashWithGroupId | None:
        """Add a key for the first tokens of a block; see `BlockPool.cache_partial_block`.

        Raises:
            InvalidArgumentError: the tokens end at a block, or hashes are as long as blocks. Never raised for
                the null block or with `replace_existing_hashes`. Nothing has changed.
        """
        is_partial = block_size > self.hash_block_size and num_tokens % block_size != 0
        if not is_partial and not replace_existing_hashes and not block.is_null:
            raise InvalidArgumentError(
                f"{num_tokens} tokens end at a block of {block_size} tokens, with hashes of "
                f"{self.hash_block_size}; cache full blocks with cache_full_blocks()"
            )
        has_features = (
            self.enable_kv_cache_events and num_tokens > self.hash_block_size and request.mm_features
        )
        if self.last_feature_only and has_features:
            request = copy(request)
            request.mm_features = request.mm_features[-1:]
        return super().cache_partial_block(
            request, block, num_tokens, kv_cache_group_id, block_size, replace_existing_hashes
        )
