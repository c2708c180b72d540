"""`register`: replaces vLLM's classes by kv_pool's, if enabled and if the vLLM version was tested."""

import importlib
import os
import sys
from typing import Final

from kv_pool.core.block import COMPILED
from kv_pool.environment import (
    FORCE,
    LEVEL,
    LEVELS,
    explain_plugins,
    find_control,
    find_level,
    list_mistakes,
)
from kv_pool.errors import InvalidArgumentError
from kv_pool.integrations.vllm.class_swap import SwapError, find_obstacles, swap_classes
from kv_pool.integrations.vllm.releases import (
    CHECKED_VERSIONS,
    REPLACED,
    find_release,
    is_checked,
    load_classes,
)
from kv_pool.integrations.vllm_warnings import warn
from kv_pool.loggers import get_logger
from kv_pool.version import __version__

logger = get_logger(__name__)

_MARKS: Final = {
    "manager": ("vllm.v1.core.kv_cache_manager", "KVCacheManager"),
    "pool": ("vllm.v1.core.block_pool", "BlockPool"),
}
"""A class by which to recognize each active level, the highest first."""


def register(level: str | None = None) -> None:
    """Make vLLM use kv_pool in this process. Called by vLLM in each process, before a pool is created.

    Args:
        level: `pool` replaces vLLM's block pool; `manager` replaces its KV cache manager as well, so that the
            scheduler calls a compiled manager. Default: the environment variable KV_POOL_VLLM, or `pool`. A
            given level is written to that variable, for the engine processes that start later.
    Raises:
        InvalidArgumentError: `level` is neither of these. Nothing has changed.

    Does nothing in these cases, and warns:

    - The environment variable VLLM_PLUGINS does not name kv_pool (if it is unset, vLLM calls every plugin).
      The warning is left out if no variable of `kv_pool.environment` is set.
    - KV_POOL_VLLM is neither `pool` nor `manager`.
    - vLLM's version is not among the `CHECKED_VERSIONS`, and KV_POOL_VLLM_FORCE is not 1.
    - kv_pool's classes for the level cannot be loaded, or vLLM lacks one of those to replace.
    - It is too late to replace the classes, see `find_obstacles`.
    - A module of vLLM cannot be run again with the new classes, see `swap_classes`.

    Replaces all classes or none. A second call changes nothing, except that it may raise the level. If
    KV_POOL_VLLM_CONTROL is 1 or the path of a socket, each pool opens a control socket: see `pool_control`.
    Variables that have no effect are logged as warnings, too.
    """
    if level is not None:
        if level not in LEVELS:
            raise InvalidArgumentError(f"level is {level!r}; it is one of {', '.join(LEVELS)}")
        os.environ[LEVEL] = level
    if explain_plugins():
        logger.debug("kv_pool is installed but not enabled: VLLM_PLUGINS does not name it")
        for mistake in list_mistakes():
            _warn(mistake)
        return
    level = find_level()
    if level not in LEVELS:
        _warn(f"{LEVEL} is {level!r}; it is one of {', '.join(LEVELS)}")
        return
    if level == "pool" and _find_active_level() == "manager":
        _warn("a level cannot be lowered. Later processes use level pool")
        return
    import vllm

    version = vllm.__version__
    level = _choose_level(level, version)
    if level is None:
        return
    try:
        replacements = _find_replacements(level)
    except (ImportError, AttributeError) as error:
        _warn(f"vLLM {version} lacks a class that it replaces ({error})")
        return
    except Exception as error:  # a module that is imported may raise anything
        _warn(f"its classes cannot be loaded with vLLM {version} ({type(error).__name__}: {error})")
        return
    if not replacements:
        return
    obstacles = find_obstacles(replacements)
    if obstacles:
        _warn(f"{'; '.join(obstacles)}. Register it before an engine is created.")
        return
    try:
        num_names = swap_classes(replacements)
    except SwapError as error:
        _warn(str(error))
        return
    if find_control():
        _show_pools()
    for mistake in list_mistakes(level=level):
        warn(f"kv_pool has a wrong setting: {mistake}")
    logger.info(
        "kv_pool %s (%s) replaces the %s of vLLM %s: %d classes, rebound in %d places",
        __version__,
        "compiled" if COMPILED else "plain Python",
        "block pool" if level == "pool" else "block pool and KV cache manager",
        version,
        len(replacements),
        num_names,
    )


def _show_pools() -> None:
    """Prepare what shows the pools of engines: no sockets of killed ones, labels, and metrics in vLLM's."""
    from kv_pool.integrations.vllm.pool_control import name_models, remove_sockets_at_exit

    remove_sockets_at_exit(find_control())
    try:
        name_models(importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler)
        importlib.import_module("kv_pool.integrations.vllm.stat_logger").replace_stat_logger()
    except Exception as error:  # a module that is imported may raise anything
        warn(f"kv_pool's metrics are not among vLLM's ({type(error).__name__}: {error})")


def _choose_level(level: str, version: str) -> str | None:
    """Return the level to use with this version, `level` or a lower one, or None. Log why if not `level`."""
    if is_checked(level, version):
        return level
    checked = ", ".join(CHECKED_VERSIONS[level])
    if os.environ.get(FORCE) == "1":
        major, minor = find_release(version)
        warn(
            f"kv_pool was checked with vLLM {checked}; {FORCE}=1 forces it on {version}, with "
            f"its classes for {major}.{minor}"
        )
        return level
    if is_checked("pool", version):
        warn(
            f"kv_pool uses level pool: level {level} was checked with vLLM {checked}, and this is {version}. "
            f"Set {FORCE}=1 to use it anyway."
        )
        return "pool"
    _warn(f"this is vLLM {version}, and it was checked with {checked}. Set {FORCE}=1 to use it anyway.")
    return None


def _warn(reason: str) -> None:
    """Log why nothing is replaced, after what is active in this process: vLLM's classes, or a level."""
    active = _find_active_level()
    stays = "kv_pool is not used" if active is None else f"kv_pool stays at level {active}"
    warn(f"{stays}: {reason}")


def _find_active_level() -> str | None:
    """Return the level whose classes vLLM's modules have now; None for vLLM's own classes."""
    for level, (module_name, name) in _MARKS.items():
        found = getattr(sys.modules.get(module_name), name, None)
        if found is not None and found.__module__.startswith("kv_pool."):
            return level
    return None


def _find_replacements(level: str) -> dict[type, type]:
    """Return vLLM's class -> kv_pool's class, for classes that are not replaced yet."""
    new_classes = load_classes(level)
    if find_control():
        from kv_pool.integrations.vllm.pool_control import make_controlled, make_controlled_manager

        new_classes["BlockPool"] = make_controlled(new_classes["BlockPool"])
        if level == "manager":
            new_classes["KVCacheManager"] = make_controlled_manager(new_classes["KVCacheManager"])
    replacements: dict[type, type] = {}
    for module_name, names in REPLACED[level].items():
        module = importlib.import_module(module_name)
        for name in names:
            theirs, ours = getattr(module, name), new_classes[name]
            if theirs is not ours:
                replacements[theirs] = ours
    return replacements
