"""Replace classes after modules have imported them.

Before vLLM loads plugins, its engine process has imported the scheduler, and with it every module with
`from vllm.v1.core.block_pool import BlockPool`. Therefore the names are rebound in all loaded modules:

    module                       before              after
    defines the class            BlockPool -> old    BlockPool -> new
    imported the class           BlockPool -> old    BlockPool -> new
    derived from the class       class Shared(old)   the module is reloaded: class Shared(new)
    loaded later                                     imports new
"""

import gc
import importlib
import sys
from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any


class SwapError(Exception):
    """A module could not be run again with the new classes; every module has its old classes."""


def find_obstacles(old_classes: Iterable[type]) -> list[str]:
    """Return the reasons why these classes can no longer be replaced, one clause each; [] if they can.

    Changes nothing. An existing instance is an obstacle: its old methods would meet new blocks. A subclass is
    an obstacle only if its module defines anything else, which a reload would replace.
    """
    old = list(old_classes)
    subclasses = _find_subclasses(old)
    alive = _find_types_in_use([*old, *subclasses])
    obstacles = [f"a {cls.__name__} exists already" for cls in (*old, *subclasses) if cls in alive]
    for cls in subclasses:
        if not _may_run_again(sys.modules.get(cls.__module__), subclasses):
            obstacles.append(f"{cls.__module__}.{cls.__qualname__} derives from vLLM's class already")
    return obstacles


def swap_classes(replacements: Mapping[type, type]) -> int:
    """Rebind each old class to the new one in all loaded modules; return the number of names rebound.

    Modules that derive from an old class are reloaded. Call this only if `find_obstacles` returns [].

    Raises:
        SwapError: a module that is reloaded raised an error. Nothing has changed: all names are bound to the
            old classes, those of modules loaded meanwhile too.
    """
    subclasses = _find_subclasses(replacements)
    derived_in = [sys.modules[name] for name in dict.fromkeys(cls.__module__ for cls in subclasses)]
    contents = [dict(vars(module)) for module in derived_in]
    loaded = set(sys.modules)
    rebound: list[_Binding] = []
    module: ModuleType | None = None
    try:
        _rebind(replacements, _list_modules(), rebound)
        for module in derived_in:
            importlib.reload(module)
            derived = [cls for cls in subclasses if cls.__module__ == module.__name__]
            new_of = {cls: getattr(module, cls.__name__) for cls in derived}
            for cls, new in new_of.items():
                if new is cls:
                    raise LookupError(f"it does not define {cls.__name__} again")
            _rebind(new_of, _list_modules(), rebound)
    except Exception as error:
        for changed, name, old in reversed(rebound):
            setattr(changed, name, old)
        for changed, content in zip(derived_in, contents, strict=True):
            _restore(changed, content)
        old_of = {new: old for old, new in replacements.items()}
        _rebind(old_of, _list_modules_loaded_since(loaded, old_of), [])
        if module is None:
            raise
        raise SwapError(
            f"{module.__name__} cannot be run again with the new classes ({type(error).__name__}: {error})"
        ) from error
    return len(rebound)


def _find_subclasses(classes: Iterable[type]) -> list[type]:
    """Return all classes derived from these, bases before subclasses."""
    found: list[type] = []
    waiting = list(classes)
    while waiting:
        below: list[type] = waiting.pop(0).__subclasses__()
        found += below
        waiting += below
    return list(dict.fromkeys(found))


def _may_run_again(module: ModuleType | None, subclasses: list[type]) -> bool:
    """Return True if the module defines some of these subclasses and no other class or function."""
    if module is None:
        return False
    defined = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type | FunctionType) and thing.__module__ == module.__name__
    ]
    return bool(defined) and all(thing in subclasses for thing in defined)


_Binding = tuple[ModuleType, str, Any]
"""A module, a name in it, and the value before the name was rebound."""


def _rebind(
    replacements: Mapping[type, type], modules: Iterable[ModuleType], rebound: list[_Binding]
) -> None:
    """Rebind names in these modules, and append each to `rebound`."""
    # Compare by identity: equality or isinstance checks would trigger lazy proxies in modules.
    new_of = {id(old): new for old, new in replacements.items()}
    for module in modules:
        for name, value in list(vars(module).items()):
            new = new_of.get(id(value))
            if new is not None:
                setattr(module, name, new)
                rebound.append((module, name, value))


def _list_modules() -> list[ModuleType]:
    return [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]


def _list_modules_loaded_since(loaded: set[str], new_classes: Iterable[type]) -> list[ModuleType]:
    """Return the modules that are not in `loaded`, except those of the packages of the new classes."""
    packages = {cls.__module__.partition(".")[0] for cls in new_classes}
    names = [name for name in sys.modules if name not in loaded and name.partition(".")[0] not in packages]
    return [module for name in names if isinstance(module := sys.modules[name], ModuleType)]


def _restore(module: ModuleType, content: dict[str, Any]) -> None:
    """Give a module the names and values that it had before it was reloaded."""
    namespace = vars(module)
    namespace.update(content)
    for name in set(namespace) - set(content):
        del namespace[name]


def _find_types_in_use(classes: list[type]) -> set[type]:
    """Return the types of all objects that refer to these classes, as their instances do."""
    # vLLM freezes the heap when an engine is complete; frozen objects are not searched.
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    try:
        # One pass in C takes about half the time of a loop over gc.get_objects().
        return {type(thing) for thing in gc.get_referrers(*classes)}
    finally:
        if is_frozen:
            gc.freeze()
