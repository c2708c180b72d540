"""A name that begins with an underscore is used only in its own package."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "kv_pool"
FOLDERS = sorted(folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists())
# Underscore names of other projects: name -> owner.
FOREIGN = {
    "_exit": "os",
    "_replace": "NamedTuple",
    "_value_": "Enum",
    "_prompt_embeds_per_block_hashes": "vLLM's Request",
    "_insert_block_hash": "vLLM's BlockPool",
    "_scaled_dot_product_flash_attention_for_cpu": "torch: attention with its log-sum-exp",
}


def is_private(name):
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def find_defined(tree):
    """Return the underscore names that classes and modules of a file define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if is_own(node):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value  # a slot, or a name for setattr


def is_own(node):
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def find_used(tree):
    """Return the underscore names used on objects other than `self`, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node):
            yield node.attr, node.lineno


def list_foreign_uses(folder):
    trees = {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}
    defined = {name for tree in trees.values() for name in find_defined(tree)}
    return [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path, tree in trees.items()
        for name, line in find_used(tree)
        if name not in defined and name not in FOREIGN
    ]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_no_package_uses_private_names_of_another(folder):
    assert list_foreign_uses(folder) == []


def test_check_detects_a_foreign_private_name():
    tree = ast.parse("class A:\n    def __init__(self, b):\n        self._x = b._y\n        b._x = 1\n")
    assert {name for name in find_defined(tree) if is_private(name)} == {"_x"}
    assert list(find_used(tree)) == [("_y", 3), ("_x", 4)]
