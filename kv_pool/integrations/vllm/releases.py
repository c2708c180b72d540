"""`Release`: what kv_pool replaces in one release of vLLM, and by which classes."""

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Release:
    """One minor release of vLLM.

    Attributes:
        number: (0, 33) for 0.33.
        pool_class, manager_class: `module:name` of what replaces `BlockPool` and `KVCacheManager` in this
            release. The other classes are those of `pool_classes` and `manager_classes` in each release.
    """

    number: tuple[int, int]
    pool_class: str
    manager_class: str


PACKAGE = "kv_pool.integrations.vllm"

# Newest first. A release needs an entry only if kv_pool's classes for it differ from those of the one before.
RELEASES = (
    Release((0, 33), f"{PACKAGE}.pool_classes:BlockPool", f"{PACKAGE}.manager_classes:KVCacheManager"),
    Release((0, 32), f"{PACKAGE}.older_pools:BlockPool032", f"{PACKAGE}.older_managers:KVCacheManager032"),
    Release((0, 31), f"{PACKAGE}.older_pools:BlockPool031", f"{PACKAGE}.older_managers:KVCacheManager031"),
    Release((0, 30), f"{PACKAGE}.older_pools:BlockPool030", f"{PACKAGE}.older_managers:KVCacheManager030"),
)


def find_release(version: str) -> Release:
    """Return the newest known release that is not newer than `version`.

    For an older version, return the oldest; for one without numbers, such as `dev`, the newest.
    """
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()):
        return RELEASES[0]
    number = int(major), int(minor)
    return next((release for release in RELEASES if release.number <= number), RELEASES[-1])


def load_classes(release: Release, level: str) -> dict[str, Any]:
    """Return kv_pool's classes for this level of the release, by vLLM's names. Imports vLLM."""
    pool_classes = importlib.import_module(f"{PACKAGE}.pool_classes")
    found = {name: getattr(pool_classes, name) for names in POOL_LEVEL.values() for name in names}
    found["BlockPool"] = pkgutil.resolve_name(release.pool_class)
    if level == "manager":
        found["KVCacheBlocks"] = importlib.import_module(f"{PACKAGE}.manager_classes").KVCacheBlocks
        found["KVCacheManager"] = pkgutil.resolve_name(release.manager_class)
    return found
