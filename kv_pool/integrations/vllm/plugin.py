"""`register`: replaces vLLM's classes by kv_pool's, if enabled and if the vLLM version was tested."""

import importlib
import logging
import os

from kv_pool.core.mode import COMPILED
from kv_pool.errors import InvalidArgumentError
from kv_pool.integrations.vllm.checked_versions import CHECKED_VERSIONS
from kv_pool.integrations.vllm.class_swap import find_obstacles, swap_classes
from kv_pool.version import __version__

# A child of vLLM's logger, which vLLM configures.
logger = logging.getLogger("vllm.kv_pool")

# The replaced classes, by the vLLM module that defines them.
REPLACED = {
    "vllm.v1.core.block_pool": ("BlockPool", "BlockHashToBlockMap"),
    "vllm.v1.core.kv_cache_utils": ("KVCacheBlock", "FreeKVCacheBlockQueue"),
    "vllm.v1.core.kv_cache_metrics": ("KVCacheMetricsCollector", "BlockMetricsState"),
}
# Those that level `manager` replaces in addition.
REPLACED_MANAGER = {"vllm.v1.core.kv_cache_manager": ("KVCacheManager", "KVCacheBlocks")}
LEVELS = ("pool", "manager")


def register(level: str | None = None) -> None:
    """Make vLLM use kv_pool in this process. Called by vLLM in each process, before a pool is created.

    Args:
        level: `pool` replaces vLLM's block pool; `manager` replaces its KV cache manager as well, so that the
            scheduler calls a compiled manager. Default: the environment variable KV_POOL_VLLM, or `pool`. A
            given level is written to that variable, for the engine processes that start later.
    Raises:
        InvalidArgumentError: `level` is neither of these. Nothing has changed.

    Does nothing in these cases; all but the first are logged as warnings:

    - The environment variable VLLM_PLUGINS does not name kv_pool (if it is unset, vLLM calls every plugin).
    - KV_POOL_VLLM is neither `pool` nor `manager`.
    - vLLM's version is not in `CHECKED_VERSIONS`, and KV_POOL_VLLM_FORCE is not 1.
    - It is too late to replace the classes, see `find_obstacles`.

    Replaces all classes or none; a second call changes nothing. If KV_POOL_VLLM_CONTROL is 1 or the path of
    a socket, each pool opens a control socket: see `pool_control`.
    """
    if level is not None:
        if level not in LEVELS:
            raise InvalidArgumentError(f"level is {level!r}; it is one of {', '.join(LEVELS)}")
        os.environ["KV_POOL_VLLM"] = level
    if "kv_pool" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        logger.debug("kv_pool is installed but not enabled: VLLM_PLUGINS does not name it")
        return
    level = os.environ.get("KV_POOL_VLLM") or LEVELS[0]
    if level not in LEVELS:
        logger.warning("kv_pool is not used: KV_POOL_VLLM is %r; it is one of %s", level, ", ".join(LEVELS))
        return
    import vllm

    version = vllm.__version__
    if version.partition("+")[0] not in CHECKED_VERSIONS:
        checked = ", ".join(CHECKED_VERSIONS)
        if os.environ.get("KV_POOL_VLLM_FORCE") != "1":
            logger.warning(
                "kv_pool is not used: this is vLLM %s, and it was checked with %s. "
                "Set KV_POOL_VLLM_FORCE=1 to use it anyway.",
                version,
                checked,
            )
            return
        logger.warning(
            "kv_pool was checked with vLLM %s; KV_POOL_VLLM_FORCE=1 forces it on %s", checked, version
        )
    try:
        replacements = _find_replacements(level)
    except (ImportError, AttributeError) as error:
        logger.warning("kv_pool is not used: vLLM %s lacks a class that it replaces (%s)", version, error)
        return
    if not replacements:
        return
    obstacles = find_obstacles(replacements)
    if obstacles:
        logger.warning(
            "kv_pool is not used: %s. Register it before an engine is created.", "; ".join(obstacles)
        )
        return
    num_names = swap_classes(replacements)
    logger.info(
        "kv_pool %s (%s) replaces the %s of vLLM %s: %d classes, rebound in %d places",
        __version__,
        "compiled" if COMPILED else "plain Python",
        "block pool" if level == "pool" else "block pool and KV cache manager",
        version,
        len(replacements),
        num_names,
    )


def _find_replacements(level: str) -> dict[type, type]:
    """Return vLLM's class -> kv_pool's class, for classes that are not replaced yet."""
    from kv_pool.integrations.vllm import pool_classes

    new_classes = vars(pool_classes)
    has_control = os.environ.get("KV_POOL_VLLM_CONTROL", "0") not in ("", "0")
    if has_control:
        from kv_pool.integrations.vllm.controlled_block_pool import ControlledBlockPool

        new_classes = {**new_classes, "BlockPool": ControlledBlockPool}
    replaced = REPLACED
    if level == "manager":
        from kv_pool.integrations.vllm import manager_classes

        replaced = {**REPLACED, **REPLACED_MANAGER}
        new_classes = {**new_classes, "KVCacheBlocks": manager_classes.KVCacheBlocks}
        new_classes["KVCacheManager"] = manager_classes.KVCacheManager
        if has_control:
            from kv_pool.integrations.vllm.controlled_manager import ControlledKVCacheManager

            new_classes["KVCacheManager"] = ControlledKVCacheManager
    replacements: dict[type, type] = {}
    for module_name, names in replaced.items():
        module = importlib.import_module(module_name)
        for name in names:
            theirs, ours = getattr(module, name), new_classes[name]
            if theirs is not ours:
                replacements[theirs] = ours
    return replacements
