"""Imports point downwards only, in the layers of kv_pool/README.md."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kv_pool"

LAYERS = {
    "ids": 0,
    "errors": 0,
    "documentation": 0,
    "version": 0,
    "closing": 0,
    "lazy_names": 0,
    "loggers": 0,
    "environment": 0,
    "core": 1,
    "error_names": 1,
    "foreign_bytes": 1,
    "option": 1,
    "protocol": 1,
    "quantities": 1,
    "regular_files": 1,
    "threads": 1,
    "contiguous": 2,
    "drawing": 2,
    "events": 2,
    "storage": 2,
    "metrics": 4,
    "policies": 2,
    "shared_options": 2,
    "manager": 3,
    "reports": 3,
    "migration": 4,
    "tiers": 4,
    "adapter": 5,
    "control": 6,
    "integrations": 7,
    "lab": 7,
    "cli": 8,
    "replay": 8,
    "__main__": 9,
}
KEPT_OUT_OF_CORE = {"torch", "zmq", "time", "io", "pathlib"}

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path):
    """Return the part that a file belongs to: `core/block.py` is core, `errors.py` is errors."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_by(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def find_arrows(path):
    """Return the parts of kv_pool that a file imports from."""
    for name in imported_by(path):
        parts = name.split(".")
        assert name != "kv_pool", f"{path}: import the module that has it, not the whole package"
        if parts[0] == "kv_pool" and parts[1] in LAYERS:
            yield parts[1]


def is_allowed(source, target):
    """Return whether an import is allowed: downwards, within one part, and of ids and errors."""
    return source == target or LAYERS[target] < LAYERS[source]


def list_imported_modules(path):
    """Return the modules of the same part that a file imports outside functions, type-only ones included."""
    own = ".".join(("kv_pool", *path.relative_to(PACKAGE).with_suffix("").parts))
    part = ".".join(own.split(".")[:2])
    pending = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If | ast.Try):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        elif isinstance(node, ast.ImportFrom) and node.module.startswith(part + "."):
            yield node.module
        elif isinstance(node, ast.ImportFrom) and node.module.startswith(part):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def find_circle(imports):
    """Return the modules of an import cycle in order; [] if there is none."""
    done = set()

    def visit(module, way):
        if module in way:
            return way[way.index(module) :]
        if module in done or module not in imports:
            return []
        for imported in imports[module]:
            circle = visit(imported, [*way, module])
            if circle:
                return circle
        done.add(module)
        return []

    return next(filter(None, (visit(module, []) for module in imports)), [])


def test_module_imports_have_no_cycles():
    imports = {
        ".".join(("kv_pool", *path.relative_to(PACKAGE).with_suffix("").parts)): [
            *list_imported_modules(path)
        ]
        for path in FILES
        if path.name != "__init__.py"
    }
    assert find_circle(imports) == []


def folder_of(module):
    """Return the folder of a name: `kv_pool.tiers` for `kv_pool.tiers.swapper.SwapPlan`."""
    while not PACKAGE.parent.joinpath(*module.split(".")).is_dir():
        module = module.rpartition(".")[0]
    return module


def test_folder_imports_have_no_cycles():
    """Imports inside functions count, too: of two folders one is above the other."""
    imports = {}
    for path in FILES:
        if path.name == "__init__.py":
            continue  # exports names of the folders below lazily
        folder = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
        part = ".".join(folder.split(".")[:2])
        imported = {folder_of(name) for name in imported_by(path) if name.startswith(part + ".")}
        imports.setdefault(folder, set()).update(imported - {folder, "kv_pool"})
    assert {"kv_pool.tiers", "kv_pool.tiers.formats"} <= imports.keys()
    assert find_circle(imports) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    source = part_of(path)
    if source == "__init__":
        return
    assert source in LAYERS, f"{source} has no layer: add it here and to the map"
    wrong = sorted({target for target in find_arrows(path) if not is_allowed(source, target)})
    assert not wrong, f"{path.relative_to(PACKAGE)} (L{LAYERS[source]}) imports from {wrong}"


def test_only_commands_import_the_lab():
    importers = {part_of(path) for path in FILES if "lab" in find_arrows(path)} - {"lab", "__init__"}
    assert importers == {"cli"}


def test_core_uses_no_tensors_sockets_files_or_clocks():
    """The exception is the default clock, by which holds expire, in `core/deadlines.py`."""
    for path in (PACKAGE / "core").glob("*.py"):
        found = KEPT_OUT_OF_CORE & {name.split(".")[0] for name in imported_by(path)}
        assert found == ({"time"} if path.name == "deadlines.py" else set()), path


def test_map_names_every_folder():
    drawn = (PACKAGE / "README.md").read_text()
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in FILES} - {"."}
    assert not [folder for folder in sorted(folders) if f"`{folder}/`" not in drawn]


def test_map_names_only_existing_files():
    """Paths start at the package or at the top level."""
    names = re.findall(r"`([\w./]+(?:\.py|/))", (PACKAGE / "README.md").read_text())
    assert len(names) > 50
    assert not [name for name in names if not (PACKAGE / name).exists() and not (ROOT / name).exists()]
