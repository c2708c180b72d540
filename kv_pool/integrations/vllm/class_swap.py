"""Put classes in the place of others after modules have imported them.

Before vLLM loads plugins its engine process has imported the scheduler, and with it every module that says
`from vllm.v1.core.block_pool import BlockPool`. So the names are bound anew in all loaded modules:

    module                       before              after
    where it is defined          BlockPool -> old    BlockPool -> new
    whoever imported it          BlockPool -> old    BlockPool -> new
    whoever derived from it      class Shared(old)   the module is run again: class Shared(new)
    loaded later                                     imports new
"""

import gc
import importlib
import sys
from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType


def find_obstacles(old_classes: Iterable[type]) -> list[str]:
    """Why it is too late to swap these classes: one clause each, [] when it is not. Only looks.

    An instance of an old class would go on with old methods that meet new blocks. A subclass is no obstacle
    where its module has nothing else to lose by being run again.
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
    """Bind each new class wherever a loaded module has bound the old one; how many names that were.

    Modules that derive from an old class are run again. Call it only where `find_obstacles` finds none.
    """
    subclasses = _find_subclasses(replacements)
    num_bound = _bind_anew(replacements)
    for module_name in dict.fromkeys(cls.__module__ for cls in subclasses):
        module = importlib.reload(sys.modules[module_name])
        derived = [cls for cls in subclasses if cls.__module__ == module_name]
        num_bound += _bind_anew({cls: getattr(module, cls.__name__) for cls in derived})
    return num_bound


def _find_subclasses(classes: Iterable[type]) -> list[type]:
    """All classes derived from these, a base before what derives from it."""
    found: list[type] = []
    waiting = list(classes)
    while waiting:
        below: list[type] = waiting.pop(0).__subclasses__()
        found += below
        waiting += below
    return list(dict.fromkeys(found))


def _may_run_again(module: ModuleType | None, subclasses: list[type]) -> bool:
    """Does the module define these subclasses and no other class or function?"""
    if module is None:
        return False
    defined = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type | FunctionType) and thing.__module__ == module.__name__
    ]
    return bool(defined) and all(thing in subclasses for thing in defined)


def _bind_anew(replacements: Mapping[type, type]) -> int:
    # By identity: comparing or classifying what modules hold would wake lazy proxies.
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
