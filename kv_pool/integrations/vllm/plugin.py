"""`register`: replaces vLLM's classes by kv_pool's, if enabled and if the vLLM version was tested."""

import importlib
import logging
import os

from kv_pool.core.mode import COMPILED
from kv_pool.integrations.vllm.checked_versions import CHECKED_VERSIONS, is_checked
from kv_pool.integrations.vllm.class_swap import find_obstacles, swap_classes
from kv_pool.integrations.vllm.releases import Release, find_release, load_pool_classes
from kv_pool.version import __version__

# A child of vLLM's logger, which vLLM configures.
logger = logging.getLogger("vllm.kv_pool")


def register() -> None:
    """Make vLLM use kv_pool in this process. Called by vLLM in each process, before a pool is created.

    Does nothing in these cases; the last two are logged as warnings:

    - The environment variable VLLM_PLUGINS does not name kv_pool (if it is unset, vLLM calls every plugin).
    - vLLM's version is not among the `CHECKED_VERSIONS`, and KV_POOL_VLLM_FORCE is not 1.
    - It is too late to replace the classes, see `find_obstacles`.

    Replaces all classes or none; a second call changes nothing. If KV_POOL_VLLM_CONTROL is 1 or the path of
    a socket, each pool opens a control socket: see `pool_control`.
    """
    if "kv_pool" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        logger.debug("kv_pool is installed but not enabled: VLLM_PLUGINS does not name it")
        return
    import vllm

    version = vllm.__version__
    release = find_release(version)
    if not is_checked("pool", version):
        checked = ", ".join(CHECKED_VERSIONS["pool"])
        if os.environ.get("KV_POOL_VLLM_FORCE") != "1":
            logger.warning(
                "kv_pool is not used: this is vLLM %s, and it was checked with %s. "
                "Set KV_POOL_VLLM_FORCE=1 to use it anyway.",
                version,
                checked,
            )
            return
        logger.warning(
            "kv_pool was checked with vLLM %s; KV_POOL_VLLM_FORCE=1 forces it on %s, with its classes "
            "for %d.%d",
            checked,
            version,
            *release.number,
        )
    try:
        replacements = _find_replacements(release)
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
        "kv_pool %s (%s) replaces the block pool of vLLM %s: %d classes, rebound in %d places",
        __version__,
        "compiled" if COMPILED else "plain Python",
        version,
        len(replacements),
        num_names,
    )


def _find_replacements(release: Release) -> dict[type, type]:
    """Return vLLM's class -> kv_pool's class, for classes that are not replaced yet."""
    new_classes = load_pool_classes(release)
    if os.environ.get("KV_POOL_VLLM_CONTROL", "0") not in ("", "0"):
        from kv_pool.integrations.vllm.controlled_block_pool import make_controlled

        new_classes["BlockPool"] = make_controlled(new_classes["BlockPool"])
    replacements: dict[type, type] = {}
    for module_name, names in release.replaced["pool"].items():
        module = importlib.import_module(module_name)
        for name in names:
            theirs, ours = getattr(module, name), new_classes[name]
            if theirs is not ours:
                replacements[theirs] = ours
    return replacements
