"""Docstrings, signatures and annotations equal those of the sources, compiled or plain."""

import __future__

import ast
import importlib
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import kv_pool
from kv_pool import BlockPool
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block import KVCacheBlock

PACKAGE = Path(__file__).parent.parent / "kv_pool"
PATHS = sorted(
    path
    for folder in ("core", "contiguous", "manager")
    for path in (PACKAGE / folder).rglob("*.py")
    if path.name != "__init__.py"
)


def name_module(path):
    return ".".join(("kv_pool", *path.relative_to(PACKAGE).with_suffix("").parts))


def is_public(node):
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")


def list_functions(path):
    """Return the module, and (definition, object, class) of each public function, method and property."""
    module = importlib.import_module(name_module(path))
    for node in filter(is_public, ast.parse(path.read_text()).body):
        found = getattr(module, node.name)
        if isinstance(node, ast.FunctionDef):
            yield module, node, found, None
            continue
        for method in filter(is_public, node.body):
            if not any(isinstance(one, ast.Attribute) for one in method.decorator_list):  # not a setter
                yield module, method, inspect.getattr_static(found, method.name), found


def list_classes(path):
    module = importlib.import_module(name_module(path))
    for node in filter(is_public, ast.parse(path.read_text()).body):
        if isinstance(node, ast.ClassDef):
            yield module, node, getattr(module, node.name)


def check_signature(module, node, signature, is_constructor=False):
    """Compare parameters and result with the definition, evaluated in the module."""

    def evaluate(expression):
        return eval(ast.unparse(expression), vars(module)) if expression else inspect.Parameter.empty

    def read_type(expression):
        as_text = vars(module).get("annotations") is __future__.annotations
        return ast.unparse(expression) if expression and as_text else evaluate(expression)

    arguments = node.args
    in_order = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(in_order) - len(arguments.defaults)) + arguments.defaults
    kinds = [inspect.Parameter.POSITIONAL_ONLY] * len(arguments.posonlyargs)
    kinds += [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(arguments.args)
    expected = [
        (one.arg, kind, read_type(one.annotation), evaluate(default))
        for one, kind, default in zip(in_order, kinds, defaults, strict=True)
    ]
    expected += [
        (one.arg, inspect.Parameter.KEYWORD_ONLY, read_type(one.annotation), evaluate(default))
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    found = [
        (one.name, one.kind, one.annotation, one.default)
        for one in signature.parameters.values()
        if one.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    assert found == expected[is_constructor:]
    if not is_constructor:  # Python and dataclasses annotate its result differently
        assert signature.return_annotation == read_type(node.returns)


@pytest.mark.parametrize("path", PATHS, ids=name_module)
def test_functions_and_methods_match_their_source(path):
    for module, node, found, owner in list_functions(path):
        where = f"{owner and owner.__name__}.{node.name}"
        assert found.__doc__ == ast.get_docstring(node, clean=False), where
        if any(
            ast.unparse(one) in ("property", "staticmethod", "classmethod") for one in node.decorator_list
        ):
            continue
        check_signature(module, node, inspect.signature(found))
        names = [one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg) and one.annotation]
        assert list(found.__annotations__) == [*names, "return"], where


@pytest.mark.parametrize("path", PATHS, ids=name_module)
def test_classes_and_modules_match_their_source(path):
    assert importlib.import_module(name_module(path)).__doc__ == ast.get_docstring(
        ast.parse(path.read_text()), clean=False
    )
    for module, node, found in list_classes(path):
        docstring = ast.get_docstring(node, clean=False)
        if docstring is not None or not node.bases:
            assert found.__doc__ == docstring, node.name
        for constructor in node.body:
            if isinstance(constructor, ast.FunctionDef) and constructor.name == "__init__":
                check_signature(module, constructor, inspect.signature(found), is_constructor=True)


def test_subclass_constructor_has_its_own_signature():
    class OwnPool(BlockPool):
        def __init__(self, num_gpu_blocks: int) -> None:
            super().__init__(num_gpu_blocks, True, 16)

    assert list(inspect.signature(OwnPool).parameters) == ["num_gpu_blocks"]
    assert "early_share" in inspect.signature(RunBlockPool).parameters
    assert OwnPool.__doc__ is None


def test_bound_methods_have_annotations():
    pool = BlockPool(4, True, 16)
    assert str(inspect.signature(pool.get_new_blocks)).startswith("(num_blocks: int) -> list[")
    assert typing.get_type_hints(pool.get_new_blocks) == {"num_blocks": int, "return": list[KVCacheBlock]}
    assert pool.get_new_blocks.__doc__ == BlockPool.get_new_blocks.__doc__
    assert len(pool.get_new_blocks(2)) == 2


def test_importing_reads_no_documentation():
    code = "import sys, kv_pool; print('kv_pool.documentation' in sys.modules)"
    options = ["-I"] * kv_pool.COMPILED  # the installed package, not the sources in this folder
    command = [sys.executable, *options, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert printed.stdout == "False\n"


@pytest.mark.skipif(not kv_pool.COMPILED, reason="Python passes any self to functions of its own")
def test_compiled_methods_refuse_a_foreign_self():
    """Documented methods skip CPython's check of `self`; mypyc's own check must refuse others."""
    script = Path(__file__).parent / "foreign_self.py"
    done = subprocess.run(
        [sys.executable, "-I", "-X", "faulthandler", str(script)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr[-2000:], done.stdout) == (0, "", "num_refused > 10_000=True\n")
