"""The former name of `kv_pool.lab`: in this version, its modules can still be imported from here."""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_OLD, _NEW = "kv_pool.replay", "kv_pool.lab"
__path__: list[str] = []  # modules are imported from below this one


class _MovedModules(MetaPathFinder, Loader):
    """Finds `kv_pool.replay.x` as the module `kv_pool.lab.x` itself, not as a copy of it."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        name = fullname.replace(_OLD, _NEW, 1)
        if not fullname.startswith(f"{_OLD}.") or find_spec(name) is None:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(spec.name.replace(_OLD, _NEW, 1))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # the import system has put that of the old name there


warnings.warn(f"{_OLD} is {_NEW} now", DeprecationWarning, stacklevel=2)
sys.meta_path.insert(0, _MovedModules())


def __getattr__(name: str) -> object:
    return getattr(import_module(_NEW), name)
