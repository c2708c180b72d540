"""`export_lazily`: names that a package offers, each imported when it is first used."""

import ast
from collections.abc import Callable
from importlib import import_module
from pkgutil import get_data
from sys import modules


def export_lazily(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports nothing by itself.

    Args:
        package: its `__name__`. The names are those that its `__init__.pyi` imports, where type checkers find
            them, too. None may be the name of a submodule: importing that module would replace the name.
    """
    stub = ast.parse(get_data(package, "__init__.pyi") or b"")
    module_of = {
        alias.name: statement.module
        for statement in stub.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def get_name(name: str) -> object:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
        setattr(modules[package], name, value)  # the next access is an ordinary look-up
        return value

    def list_names() -> list[str]:
        return sorted({*vars(modules[package]), *module_of})

    return get_name, list_names, list(module_of)
