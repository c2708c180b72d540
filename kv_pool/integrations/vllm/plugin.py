"""`register`: puts kv_pool's classes in the place of vLLM's, if asked to and if the version was checked."""

import importlib
import logging
import os

from kv_pool.core.mode import COMPILED
from kv_pool.integrations.vllm.checked_versions import CHECKED_VERSIONS
from kv_pool.integrations.vllm.class_swap import find_obstacles, swap_classes
from kv_pool.version import __version__

# Below vLLM's own, which is the one that vLLM configures.
logger = logging.getLogger("vllm.kv_pool")

# Where vLLM defines what is replaced.
REPLACED = {
    "vllm.v1.core.block_pool": ("BlockPool", "BlockHashToBlockMap"),
    "vllm.v1.core.kv_cache_utils": ("KVCacheBlock", "FreeKVCacheBlockQueue"),
    "vllm.v1.core.kv_cache_metrics": ("KVCacheMetricsCollector", "BlockMetricsState"),
}


def register() -> None:
    """Make vLLM use kv_pool in this process. Called by vLLM, in each process, before there is a pool.

    Does nothing unless the environment variable VLLM_PLUGINS names kv_pool (vLLM calls every installed plugin
    when it is unset), nor where vLLM's version is not in `CHECKED_VERSIONS`, unless KV_POOL_VLLM_FORCE is 1,
    nor where it is too late; the last two are logged as warnings. All or nothing, and a second call changes
    nothing.

    With KV_POOL_VLLM_CONTROL set to 1, or to the path of a socket, each pool opens a control socket: see
    `pool_control`.
    """
    if "kv_pool" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        logger.debug("kv_pool is installed but not asked for: VLLM_PLUGINS does not name it")
        return
    import vllm

    version = vllm.__version__
    if version.partition("+")[0] not in CHECKED_VERSIONS:
        checked = ", ".join(CHECKED_VERSIONS)
        if os.environ.get("KV_POOL_VLLM_FORCE") != "1":
            logger.warning(
                "kv_pool is not used: this is vLLM %s, and it was checked with %s. "
                "KV_POOL_VLLM_FORCE=1 makes vLLM use it all the same.",
                version,
                checked,
            )
            return
        logger.warning(
            "kv_pool was checked with vLLM %s; KV_POOL_VLLM_FORCE=1 forces it on %s", checked, version
        )
    try:
        replacements = _find_replacements()
    except (ImportError, AttributeError) as error:
        logger.warning("kv_pool is not used: vLLM %s lacks what it replaces (%s)", version, error)
        return
    if not replacements:
        return
    obstacles = find_obstacles(replacements)
    if obstacles:
        logger.warning(
            "kv_pool is not used: %s. It has to be registered before an engine is made.", "; ".join(obstacles)
        )
        return
    num_names = swap_classes(replacements)
    logger.info(
        "kv_pool %s (%s) takes the place of vLLM %s's block pool: %d classes, bound anew in %d places",
        __version__,
        "compiled" if COMPILED else "plain Python",
        version,
        len(replacements),
        num_names,
    )


def _find_replacements() -> dict[type, type]:
    """Ours by vLLM's, for what has not been replaced yet."""
    from kv_pool.integrations.vllm import pool_classes

    new_classes = vars(pool_classes)
    if os.environ.get("KV_POOL_VLLM_CONTROL", "0") not in ("", "0"):
        from kv_pool.integrations.vllm.controlled_block_pool import ControlledBlockPool

        new_classes = {**new_classes, "BlockPool": ControlledBlockPool}
    replacements: dict[type, type] = {}
    for module_name, names in REPLACED.items():
        module = importlib.import_module(module_name)
        for name in names:
            theirs, ours = getattr(module, name), new_classes[name]
            if theirs is not ours:
                replacements[theirs] = ours
    return replacements
