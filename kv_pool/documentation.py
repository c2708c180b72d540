"""Read docstrings, signatures and annotations of compiled code from its source files."""

import ast
import importlib
import inspect
from functools import cache
from typing import Any


def describe(compiled: Any, attribute: str) -> Any:
    """Return an attribute that a compiled class, function, method or property would have in plain Python.

    Compiled objects call this when `attribute` is read: `__doc__`, `__signature__`, `__annotations__` or
    `__globals__`. The first call for a module parses its source; `import kv_pool` does not import this file.

    Raises:
        AttributeError: the source does not have the attribute, or is not installed. For `__doc__`, the
            result is None instead.
    """
    if isinstance(compiled, type):
        source = _find_class(compiled, is_constructed=attribute == "__signature__")
    elif hasattr(compiled, "__objclass__"):
        source = vars(_find_class(compiled.__objclass__)).get(compiled.__name__)
    else:
        source = _read_module(compiled.__module__).get(compiled.__name__)
    if attribute == "__doc__":
        return getattr(source, attribute, None)
    if source is None:
        raise AttributeError(attribute)
    return inspect.signature(source) if attribute == "__signature__" else getattr(source, attribute)


def _find_class(compiled: type, is_constructed: bool = False) -> Any:
    """Return the class as its source defines it, or None without a source.

    Args:
        is_constructed: return the source of the class whose `__init__` this class uses.
    """
    for base in compiled.__mro__[:-1]:
        source = _read_module(base.__module__).get(base.__name__)
        if not is_constructed or (source is not None and "__init__" in vars(source)):
            return source
    return None


@cache
def _read_module(name: str) -> dict[str, Any]:
    """Return the functions and classes that a module's source defines, by name, without their bodies.

    Annotations and defaults are evaluated in the compiled module, so they name its classes.
    """
    if not name.startswith("kv_pool."):
        return {}
    module = importlib.import_module(name)
    file_name = name.rpartition(".")[2]
    folder = str(module.__file__).rpartition(file_name)[0]
    try:
        with open(f"{folder}{file_name}.py", encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except FileNotFoundError:
        return {}
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            _strip_class(node)
        elif isinstance(node, ast.FunctionDef):
            _strip_function(node)
        else:
            continue
        code = compile(ast.Module([*futures, node], []), f"{folder}{file_name}.py", "exec")
        defined: dict[str, Any] = {}
        exec(code, vars(module), defined)
        found[node.name] = defined[node.name]
    return found


def _strip_class(node: ast.ClassDef) -> None:
    """Remove everything but the docstring, the functions, and the fields of a dataclass."""
    node.bases = []
    node.decorator_list = [one for one in node.decorator_list if "mypyc_attr" not in ast.dump(one)]
    is_dataclass = any("dataclass" in ast.dump(one) for one in node.decorator_list)
    body: list[ast.stmt] = node.body[:1] if ast.get_docstring(node) is not None else []
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            _strip_function(part)
            body.append(part)
        elif is_dataclass and isinstance(part, ast.AnnAssign):
            body.append(part)
    node.body = body or [ast.copy_location(ast.Pass(), node)]


def _strip_function(node: ast.FunctionDef) -> None:
    """Remove everything but the signature and the docstring."""
    has_docstring = ast.get_docstring(node) is not None
    node.body = node.body[:1] if has_docstring else [ast.copy_location(ast.Pass(), node)]
