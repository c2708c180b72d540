"""`export_lazily`: names that a package offers, each imported when it is first used."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from sys import modules


def export_lazily(
    package: str, names_of: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the package's `__getattr__` and `__dir__`, so that importing the package imports nothing else.

    Args:
        package: its `__name__`.
        names_of: the names, by the module that defines them. None may be the name of a submodule: importing
            that module would replace the name.
    """
    module_of = {name: module for module, names in names_of.items() for name in names}

    def get_name(name: str) -> object:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
        setattr(modules[package], name, value)  # the next access is an ordinary look-up
        return value

    def list_names() -> list[str]:
        return sorted({*vars(modules[package]), *module_of})

    return get_name, list_names
