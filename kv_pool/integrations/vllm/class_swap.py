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


def find_obstacles(old_classes: Iterable[type]) -> list[str]:
    """Return the reasons why these classes can no longer be replaced, one clause each; [] if they can.

    Changes nothing. An existing instance is an obstacle: its old methods would meet new blocks. A subclass is
    an obstacle only if its module defines anything else, which a reload would replace.
    """
    old = list(old_classes)
    subclasses = _find_subclasses(old)
    alive = {type(thing) for thing in gc.get_objects()}
    obstacles = [f"a {cls.__name__} exists already" for cls in (*old, *subclasses) if cls in alive]
    for cls in subclasses:
        if not _may_run_again(sys.modules.get(cls.__module__), subclasses):
            obstacles.append(f"{cls.__module__}.{cls.__qualname__} derives from vLLM's class already")
    return obstacles


def swap_classes(replacements: Mapping[type, type]) -> int:
    """Rebind each old class to the new one in all loaded modules; return the number of names rebound.

    Modules that derive from an old class are reloaded. Call this only if `find_obstacles` returns [].
    """
    subclasses = _find_subclasses(replacements)
    num_bound = _rebind(replacements)
    for module_name in dict.fromkeys(cls.__module__ for cls in subclasses):
        module = importlib.reload(sys.modules[module_name])
        derived = [cls for cls in subclasses if cls.__module__ == module_name]
        num_bound += _rebind({cls: getattr(module, cls.__name__) for cls in derived})
    return num_bound


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


def _rebind(replacements: Mapping[type, type]) -> int:
    # Compare by identity: equality or isinstance checks would trigger lazy proxies in modules.
    new_of = {id(old): new for old, new in replacements.items()}
    num_bound = 0
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            new = new_of.get(id(value))
            if new is not None:
                setattr(module, name, new)
                num_bound += 1
    return num_bound
