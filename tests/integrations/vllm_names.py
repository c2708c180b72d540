"""The names by which the installed vLLM uses the classes that kv_pool replaces, and those that kv_pool lacks.

    PYTHONPATH=VLLM_SOURCE python tests/integrations/vllm_names.py LEVEL

prints what kv_pool's classes for the installed release lack at level pool or manager, one line each; nothing
if they fit.
"""

import ast
import importlib
import inspect
import sys
from pathlib import Path
from types import FunctionType

from kv_pool.integrations.vllm.releases import POOL_LEVEL, REPLACED, load_classes

# Parts of vLLM that handle blocks, and their names for the objects. The files that define the classes are
# omitted: they are not used.
PARTS = (
    "distributed/aux_output_connector",
    "distributed/kv_transfer",
    "v1/core",
    "v1/engine",
    "v1/hisparse",
    "v1/simple_kv_offload",
)
VARIABLES = {
    "pool": {
        "BlockPool": {
            "block_pool",
            "_block_pool",
            "cpu_block_pool",
            "gpu_block_pool",
            "_gpu_block_pool",
            "cpu_pool",
            "device_pool",
            "gpu_pool",
            "pool",
        },
        "KVCacheBlock": {"block", "blk", "null_block", "_null_block", "src_block", "dst_block"},
        "FreeKVCacheBlockQueue": {"free_block_queue", "free_queue"},
        "BlockHashToBlockMap": {"cached_block_hash_to_block"},
        "KVCacheMetricsCollector": {"metrics_collector", "kv_metrics_collector"},
    },
    "manager": {
        "KVCacheManager": {"kv_cache_manager", "_kv_cache_manager", "cache_manager"},
        "KVCacheCoordinator": {"coordinator"},
        "SingleTypeKVCacheManager": {"single_type_manager"},  # and variables of loops over them
        "KVCacheBlocks": {"new_computed_blocks", "new_blocks", "empty_kv_cache_blocks", "kv_cache_blocks"},
    },
}
LEFT_OUT = {
    "BlockPool": {"hits"},  # added by vLLM's own subclass
    # The UMBP connector replaces these in a coordinator of its own, which it makes of vLLM's classes.
    "SingleTypeKVCacheManager": {"_null_block"},
    "KVCacheBlocks": set(dir(list)),  # lists of blocks with the same variable name
}
NOT_USERS = {
    "pool": ("v1/core/block_pool.py", "v1/core/kv_cache_utils.py", "v1/core/kv_cache_metrics.py"),
    "manager": (
        "v1/core/kv_cache_manager.py",
        "v1/core/kv_cache_coordinator.py",
        "v1/core/single_type_kv_cache_manager.py",
        "v1/core/block_pool.py",
        # Coordinators of HiSparse, which level `manager` leaves to vLLM, and of engine processes.
        "kv_connector/v1/hisparse/connector.py",
        "v1/engine/coordinator.py",
        "v1/engine/core_client.py",
        "v1/engine/utils.py",
        "v1/hisparse/coordinator.py",
    ),
}
# Modules of which every class is replaced. `kv_cache_utils` defines others, too.
REPLACED_ENTIRELY = ("vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_metrics")


def make_one_of_each(classes):
    pool = classes["BlockPool"](4, True, 16)
    return {
        "BlockPool": pool,
        "KVCacheBlock": pool.blocks[1],
        "FreeKVCacheBlockQueue": pool.free_block_queue,
        "BlockHashToBlockMap": pool.cached_block_hash_to_block,
        "KVCacheMetricsCollector": classes["KVCacheMetricsCollector"](1.0),
        "BlockMetricsState": classes["BlockMetricsState"](),
    }


def make_config(num_blocks=8):
    """Return vLLM's configuration of a full attention and a window group."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    shape = {"block_size": 4, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs = [FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=8)]
    groups = [KVCacheGroupSpec([str(number)], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def make_manager_and_parts(classes):
    manager = classes["KVCacheManager"](
        make_config(), max_model_len=64, scheduler_block_size=4, hash_block_size=4, log_stats=True
    )
    return {
        "KVCacheManager": manager,
        "KVCacheCoordinator": manager.coordinator,
        "SingleTypeKVCacheManager": manager.coordinator.single_type_managers[0],
        "KVCacheBlocks": manager.empty_kv_cache_blocks,
    }


def load_theirs(replaced):
    return {
        name: getattr(importlib.import_module(module), name)
        for module, names in replaced.items()
        for name in names
    }


def list_sources(level):
    import vllm

    root = Path(vllm.__file__).parent
    paths = [path for part in PARTS for path in sorted((root / part).rglob("*.py"))]
    return [path for path in paths if not str(path).endswith(NOT_USERS[level])]


def last_name(node):
    """Return block_pool for `self.block_pool` and `block_pool`, and block for `blocks[0]`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return (last_name(node.value) or "").removesuffix("s")
    return None


def is_group_list(node):
    """Return whether an expression is a coordinator's list of managers."""
    if isinstance(node, ast.Call) and node.args:
        return any(is_group_list(argument) for argument in node.args)
    return isinstance(node, ast.Attribute) and node.attr == "single_type_managers"


def list_group_variables(tree):
    """Return the names of the variables that loop over a coordinator's managers in a file."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.comprehension)]
    targets = [loop.target for loop in loops if is_group_list(loop.iter)]
    names = [name for target in targets for name in getattr(target, "elts", [target])]
    return {name.id for name in names if isinstance(name, ast.Name)} - {"group"}


def find_used_names(level):
    """Return the attributes that vLLM's code uses, and where: class -> name -> place."""
    used = {name: {} for name in VARIABLES[level]}
    for path in list_sources(level):
        tree = ast.parse(path.read_text())
        loop_variables = list_group_variables(tree)
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(thing, name) | ast.Call(
                    ast.Name("getattr"), [thing, ast.Constant(name), *_]
                ):
                    variable, place = last_name(thing), f"{path}:{node.lineno}"
                    for class_name, variables in VARIABLES[level].items():
                        if variable in variables:
                            used[class_name].setdefault(name, place)
                    if level == "manager" and variable in loop_variables and isinstance(thing, ast.Name):
                        used["SingleTypeKVCacheManager"].setdefault(name, place)
    return used


def find_unknown_uses(level, things):
    """Return the attributes that vLLM's code uses and our objects do not have."""
    return [
        f"{class_name}.{name} is used at {place}"
        for class_name, names in find_used_names(level).items()
        for name, place in names.items()
        if not hasattr(things[class_name], name) and name not in LEFT_OUT.get(class_name, ())
    ]


def find_missing_fields(manager):
    """Return the public fields that vLLM's manager sets and ours does not have."""
    from vllm.v1.core import kv_cache_manager

    nodes = ast.walk(ast.parse(inspect.getsource(kv_cache_manager.KVCacheManager)))
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    fields = {node.attr for node in stored if last_name(node.value) == "self"}
    assert "prefix_cache_stats" in fields
    return [f"KVCacheManager.{name} is missing" for name in sorted(fields) if not hasattr(manager, name)]


def find_missing_attributes(theirs, ours):
    """Return the public attributes of vLLM's objects, also those of dataclasses, that ours do not have."""
    our_things = make_one_of_each(ours)
    return [
        f"{class_name}.{name} is missing"
        for class_name, thing in make_one_of_each(theirs).items()
        for name in dir(thing)
        if not name.startswith("_") and not hasattr(our_things[class_name], name)
    ]


def find_missing_methods(theirs, ours):
    """Return the public methods and class attributes of vLLM's classes that ours do not have."""
    return [
        f"{class_name}.{name} is missing"
        for class_name, cls in theirs.items()
        for name in dir(cls)
        if not name.startswith("_") and not hasattr(ours[class_name], name)
    ]


def find_other_classes(replaced):
    """Return the classes of the replaced modules that are not replaced."""
    return [
        f"{module_name}.{name} is not replaced"
        for module_name in REPLACED_ENTIRELY
        for name, thing in vars(importlib.import_module(module_name)).items()
        if isinstance(thing, type) and thing.__module__ == module_name and name not in replaced[module_name]
    ]


def methods_of(cls):
    """Return the constructor and all methods, including private ones, by name."""
    return {"__init__": cls} | {
        name: thing for name, thing in vars(cls).items() if inspect.isfunction(thing) and name[:2] != "__"
    }


def list_parameters(function):
    if isinstance(function, type) and isinstance(function.__init__, FunctionType):
        function = function.__init__  # its class may have a `__new__` with other parameters
    return [
        (parameter.name, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]


def find_other_parameters(theirs, ours):
    """Return the methods whose parameters have other names, another order or other defaults than vLLM's."""
    found = []
    for class_name, cls in theirs.items():
        for name, method in methods_of(cls).items():
            counterpart = ours[class_name] if name == "__init__" else getattr(ours[class_name], name, None)
            if counterpart is None:
                continue  # private and unused, or missing
            expected = list_parameters(method)
            given = list_parameters(counterpart)
            # vLLM passes the options of constructors by name.
            if set(expected) - set(given) if name == "__init__" else given[: len(expected)] != expected:
                found.append(f"{class_name}.{name} has the parameters {inspect.signature(method)}")
    return found


def find_other_event_fields(pool_class):
    """Return the fields by which vLLM's `BlockStored` differs from the events that our pool creates."""
    from vllm.distributed.kv_events import BlockStored as TheirEvent

    from kv_pool import BlockStored as OurEvent

    theirs, ours = set(TheirEvent.__struct_fields__), set(OurEvent.__struct_fields__)
    if pool_class.event_types.stored is not TheirEvent:
        ours.discard("lookahead_token_ids")
    return [f"BlockStored.{name} is new" for name in sorted(theirs - ours)] + [
        f"BlockStored.{name} is gone" for name in sorted(ours - theirs)
    ]


def find_changes(level="pool"):
    """Return everything by which the installed vLLM does not fit kv_pool's classes for it, one line each."""
    replaced = REPLACED[level]
    missing = []
    for module_name, names in replaced.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            missing.append(f"{module_name} cannot be imported: {error}")
            continue
        missing += [f"{module_name}.{name} is gone" for name in names if not hasattr(module, name)]
    if missing:
        return missing
    theirs, ours = load_theirs(replaced), load_classes(level)
    found = [*find_other_classes(POOL_LEVEL), *find_other_parameters(theirs, ours)]
    found += find_other_event_fields(ours["BlockPool"])
    found += find_missing_attributes(load_theirs(POOL_LEVEL), ours)
    found += find_unknown_uses("pool", make_one_of_each(ours))
    if level == "manager":
        parts = make_manager_and_parts(ours)
        found += find_missing_methods(
            {name: theirs[name] for name in ("KVCacheManager", "KVCacheBlocks")}, ours
        )
        found += [*find_missing_fields(parts["KVCacheManager"]), *find_unknown_uses("manager", parts)]
    return found


if __name__ == "__main__":
    print(*find_changes(*sys.argv[1:]), sep="\n")
