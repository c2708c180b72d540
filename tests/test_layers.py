"""Imports point down only. The layers are those of kv_pool/README.md."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "kv_pool"

LAYERS = {
    "ids": 0,
    "errors": 0,
    "documentation": 0,
    "version": 0,
    "machine_memory": 0,
    "core": 1,
    "error_names": 1,
    "foreign_bytes": 1,
    "regular_files": 1,
    "threads": 1,
    "contiguous": 2,
    "events": 2,
    "storage": 2,
    "metrics": 2,
    "manager": 3,
    "protocol": 3,
    "reports": 3,
    "migration": 4,
    "tiers": 4,
    "adapter": 5,
    "replay": 5,
    "control": 6,
    "cli": 7,
    "integrations": 7,
    "__main__": 8,
}
FORBIDDEN_NAMES = {"utils", "common", "helpers", "base"}
KEPT_OUT_OF_CORE = {"torch", "zmq", "time", "io", "pathlib"}

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path):
    """The layer's name a file belongs to: `core/block.py` is core, `errors.py` is errors."""
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
    """The parts of kv_pool that a file imports from."""
    for name in imported_by(path):
        parts = name.split(".")
        assert name != "kv_pool", f"{path}: import the module that has it, not the whole package"
        if parts[0] == "kv_pool" and parts[1] in LAYERS:
            yield parts[1]


def is_allowed(source, target):
    """Down is allowed, and inside one part; between siblings of one layer not, but for ids and errors."""
    return source == target or LAYERS[target] < LAYERS[source]


def list_imported_modules(path):
    """Modules of the same part that a file imports outside of functions, for the type checker included."""
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
    """The modules of a circle of imports, in order; [] if there is none."""
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


def test_modules_do_not_import_each_other_in_circles():
    imports = {
        ".".join(("kv_pool", *path.relative_to(PACKAGE).with_suffix("").parts)): [
            *list_imported_modules(path)
        ]
        for path in FILES
        if path.name != "__init__.py"
    }
    assert find_circle(imports) == []


def folder_of(module):
    """The folder of what is imported: `kv_pool.manager.swap` of `kv_pool.manager.swap.plan.SwapPlan`."""
    while not PACKAGE.parent.joinpath(*module.split(".")).is_dir():
        module = module.rpartition(".")[0]
    return module


def test_folders_of_a_package_do_not_import_each_other_in_circles():
    """Inside functions, too: a folder is above or below another one."""
    imports = {}
    for path in FILES:
        folder = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
        part = ".".join(folder.split(".")[:2])
        imported = {folder_of(name) for name in imported_by(path) if name.startswith(part + ".")}
        imports.setdefault(folder, set()).update(imported - {folder, "kv_pool"})
    assert {"kv_pool.manager.swap", "kv_pool.tiers.dump"} <= imports.keys()
    assert find_circle(imports) == []


def test_a_circle_would_be_noticed():
    assert find_circle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c"]
    assert find_circle({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_the_package_is_where_this_test_looks():
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    source = part_of(path)
    if source == "__init__":
        return
    assert source in LAYERS, f"{source} has no layer: add it here and to the map"
    wrong = sorted({target for target in find_arrows(path) if not is_allowed(source, target)})
    assert not wrong, f"{path.relative_to(PACKAGE)} (L{LAYERS[source]}) imports from {wrong}"


@pytest.mark.parametrize(
    ("source", "target"),
    [("core", "manager"), ("events", "storage"), ("metrics", "events"), ("replay", "cli"), ("ids", "errors")],
)
def test_an_arrow_up_or_across_would_be_noticed(source, target):
    assert not is_allowed(source, target)


def test_no_module_is_named_after_nothing():
    assert not [path for path in FILES if path.stem in FORBIDDEN_NAMES]


def test_the_core_knows_no_tensors_sockets_files_or_clocks():
    """But for `core/clock.py`: the time of pools that get no clock, by which holds expire."""
    for path in (PACKAGE / "core").glob("*.py"):
        found = KEPT_OUT_OF_CORE & {name.split(".")[0] for name in imported_by(path)}
        assert found == ({"time"} if path.name == "clock.py" else set()), path


def test_the_map_names_every_file():
    drawn = (PACKAGE / "README.md").read_text()
    missing = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        if path.name != "__init__.py" and f"`{path.name}`" not in drawn
    ]
    assert not missing
