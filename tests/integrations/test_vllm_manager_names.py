"""Every attribute that vLLM's code uses on a KV cache manager and its groups exists at level `manager`.

Reads the source of the installed vLLM (marker `vllm`), as `test_vllm_names` does for the pool.
"""

import ast
import inspect

import pytest
from integrations.vllm_names import last_name, list_parameters, vllm_sources

from kv_pool.integrations.vllm.releases import find_release, load_classes

pytestmark = pytest.mark.vllm

# vLLM's names for the objects, outside the files that define the replaced classes.
VARIABLES = {
    "KVCacheManager": {"kv_cache_manager", "_kv_cache_manager", "cache_manager"},
    "KVCacheCoordinator": {"coordinator"},
    "SingleTypeKVCacheManager": {"single_type_manager"},
    "KVCacheBlocks": {"new_computed_blocks", "new_blocks", "empty_kv_cache_blocks", "kv_cache_blocks"},
}
DEFINING_MODULES = ("vllm.v1.core.kv_cache_manager",)
DEFINING = {
    "v1/core/kv_cache_manager.py",
    "v1/core/kv_cache_coordinator.py",
    "v1/core/single_type_kv_cache_manager.py",
    "v1/core/block_pool.py",
}
# Coordinators of other things: of HiSparse, which level `manager` leaves to vLLM, and of engine processes.
NOT_MEANT = {
    "kv_connector/v1/hisparse/connector.py",
    "v1/engine/coordinator.py",
    "v1/engine/core_client.py",
    "v1/engine/utils.py",
    "v1/hisparse/coordinator.py",
}
# Lists of blocks with the same variable name.
LIST_METHODS = set(dir(list))
# The UMBP connector replaces these in a coordinator of its own, which it makes of vLLM's classes.
LEFT_OUT = {"SingleTypeKVCacheManager": {"_null_block"}}


def is_group_list(node):
    """Return whether an expression is a coordinator's list of managers."""
    if isinstance(node, ast.Call) and node.args:
        return any(is_group_list(argument) for argument in node.args)
    return isinstance(node, ast.Attribute) and node.attr == "single_type_managers"


def list_group_variables(tree):
    """Iterate over the names of the variables that loop over a coordinator's managers in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and is_group_list(node.iter):
            targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def used_names():
    """Return the attributes that vLLM's code uses, and where: class -> name -> place."""
    used = {name: {} for name in VARIABLES}
    for path in vllm_sources(DEFINING_MODULES):
        if any(str(path).endswith(name) for name in DEFINING | NOT_MEANT):
            continue
        tree = ast.parse(path.read_text())
        loop_variables = set(list_group_variables(tree))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            variable = last_name(node.value)
            place = f"{path}:{node.lineno}"
            for class_name, variables in VARIABLES.items():
                if variable in variables:
                    used[class_name].setdefault(node.attr, place)
            if variable in loop_variables and isinstance(node.value, ast.Name) and variable != "group":
                used["SingleTypeKVCacheManager"].setdefault(node.attr, place)
    for name in LIST_METHODS:
        used["KVCacheBlocks"].pop(name, None)
    return used


def make_config():
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
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def make_manager():
    import vllm

    manager_class = load_classes(find_release(vllm.__version__), "manager")["KVCacheManager"]
    return manager_class(
        make_config(), max_model_len=64, scheduler_block_size=4, hash_block_size=4, log_stats=True
    )


def make_one_of_each():
    manager = make_manager()
    return {
        "KVCacheManager": manager,
        "KVCacheCoordinator": manager.coordinator,
        "SingleTypeKVCacheManager": manager.coordinator.single_type_managers[0],
        "KVCacheBlocks": manager.empty_kv_cache_blocks,
    }


def test_every_name_that_vllm_uses_exists():
    ours = make_one_of_each()
    missing = [
        f"{class_name}.{name} ({place})"
        for class_name, names in used_names().items()
        for name, place in names.items()
        if not hasattr(ours[class_name], name) and name not in LEFT_OUT.get(class_name, ())
    ]
    assert not missing


def test_source_walk_finds_the_known_uses_in_vllm():
    used = used_names()
    assert {"allocate_slots", "coordinator", "take_boundary_state_offloads", "usage"} <= set(
        used["KVCacheManager"]
    )
    assert len(used["KVCacheManager"]) >= 20
    assert "enable_partial_hash_hits" in used["KVCacheCoordinator"]
    assert {"block_size", "kv_cache_spec"} <= set(used["SingleTypeKVCacheManager"])
    assert "blocks" in used["KVCacheBlocks"]


def list_methods(cls):
    return {
        name: thing
        for base in reversed(cls.__mro__)
        for name, thing in vars(base).items()
        if not name.startswith("_") and callable(thing)
    }


@pytest.mark.parametrize("class_name", ["KVCacheManager", "KVCacheBlocks"])
def test_methods_and_parameters_match_those_of_vllm(class_name):
    """All public methods exist; the parameters have the same names, order and defaults."""
    from vllm.v1.core import kv_cache_manager

    theirs = getattr(kv_cache_manager, class_name)
    ours = type(make_one_of_each()[class_name])
    counterparts = list_methods(ours)
    for name, method in list_methods(theirs).items():
        expected = list_parameters(method)
        assert name in counterparts, f"{class_name}.{name}"
        assert list_parameters(counterparts[name])[: len(expected)] == expected, f"{class_name}.{name}"
    constructor = ours.__init__ if inspect.isfunction(ours.__init__) else ours  # compiled, the class has it
    assert set(list_parameters(theirs.__init__)) <= set(list_parameters(constructor))


def test_fields_of_vllm_manager_exist():
    """Public fields that vLLM's constructor sets; those of the coordinator only as far as vLLM uses them."""
    import vllm.v1.core.kv_cache_manager as module

    source = ast.parse(inspect.getsource(module.KVCacheManager))
    fields = {
        node.attr
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and last_name(node.value) == "self"
    }
    assert "prefix_cache_stats" in fields
    manager = make_manager()
    assert [name for name in sorted(fields) if not hasattr(manager, name)] == []
