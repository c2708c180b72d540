"""The names of each package, which its `__init__.pyi` lists, and which are imported on first use."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kv_pool

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "core",
    "manager",
    "contiguous",
    "storage",
    "adapter",
    "events",
    "tiers",
    "migration",
    "lab",
    "control",
    "reports",
)
FACES = ("kv_pool", *(f"kv_pool.{package}" for package in PACKAGES))


def read_face(face):
    path = ROOT.joinpath(*face.split("."), "__init__.pyi")
    return ast.parse(path.read_text())


@pytest.mark.parametrize("face", FACES)
def test_each_name_matches_the_one_type_checkers_see(face):
    seen = {}
    for node in ast.walk(read_face(face)):
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name == alias.asname for alias in node.names)  # or checkers do not export it
            seen |= {alias.name: node.module for alias in node.names}
    package = import_module(face)
    assert len(seen) > 1
    assert package.__all__ == list(seen)
    assert set(package.__all__) <= set(dir(package))
    for name, module in seen.items():
        assert getattr(package, name) is getattr(import_module(module), name)


@pytest.mark.parametrize("face", FACES)
def test_no_name_is_also_a_submodule(face):
    folder = ROOT.joinpath(*face.split("."))
    submodules = {path.stem for path in folder.glob("*.py")} | {
        path.name for path in folder.iterdir() if path.is_dir()
    }
    assert not submodules & set(import_module(face).__all__)


@pytest.mark.parametrize("face", FACES)
def test_unknown_name_is_an_attribute_error(face):
    with pytest.raises(AttributeError, match=f"module '{face}' has no attribute 'BlokPool'"):
        import_module(face).BlokPool  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'BlokPool'"):
        exec(f"from {face} import BlokPool")


def test_one_name_has_one_meaning():
    meanings = {}
    for face in FACES:
        package = import_module(face)
        for name in package.__all__:
            meanings.setdefault(name, set()).add(id(getattr(package, name)))
    assert [name for name, things in meanings.items() if len(things) > 1] == []


def test_every_error_is_in_kv_pool_errors():
    for face in FACES:
        for name in import_module(face).__all__:
            if name.endswith("Error"):
                assert getattr(kv_pool.errors, name) is getattr(import_module(face), name)


def test_face_imports_nothing_before_first_use():
    code = (
        f"import sys, importlib; [importlib.import_module(face) for face in {FACES!r}]\n"
        "print(sorted(name for name in sys.modules if name.startswith('kv_pool.') and name.count('.') > 1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
