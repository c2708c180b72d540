"""Imports kv_pool as plain Python, from the .py files next to the .so files of a compiled installation."""

import sys
from importlib import import_module
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def import_plain(loads_names: bool = True) -> ModuleType:
    """Import the `kv_pool` package as plain Python. It and its modules stay in `sys.modules`.

    Args:
        loads_names: load its names, too; on first use they would come from the compiled modules.
    """
    spec = find_spec("kv_pool")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("kv_pool is not installed")
    package_dir = Path(spec.origin).parent

    def find_source_only(directory: str) -> FileFinder:
        if not Path(directory).is_relative_to(package_dir):
            raise ImportError("not a directory of kv_pool")
        return FileFinder(directory, (SourceFileLoader, SOURCE_SUFFIXES))

    sys.path_hooks.insert(0, find_source_only)
    sys.path_importer_cache.clear()
    try:
        package = import_module("kv_pool")
        for name in package.__all__ if loads_names else ():
            getattr(package, name)
        return package
    finally:
        sys.path_hooks.remove(find_source_only)
        sys.path_importer_cache.clear()


def import_plain_aside() -> ModuleType:
    """Import the plain package and remove it from `sys.modules`; the next import loads the installed one."""
    package = import_plain()
    for name in [name for name in sys.modules if name.partition(".")[0] == "kv_pool"]:
        del sys.modules[name]
    return package
