"""Every attribute that vLLM's code uses on pools, blocks, queues, maps and collectors exists in kv_pool.

Reads the source of the installed vLLM (marker `vllm`).
"""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from kv_pool.integrations.vllm.plugin import REPLACED

pytestmark = pytest.mark.vllm

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
}
# Fields added by vLLM's own subclasses.
ADDED_BY_VLLM = {"BlockPool": {"hits"}}


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


def load_ours():
    from kv_pool.integrations.vllm import pool_classes

    return {name: getattr(pool_classes, name) for names in REPLACED.values() for name in names}


def load_theirs():
    return {
        name: getattr(importlib.import_module(module), name)
        for module, names in REPLACED.items()
        for name in names
    }


def vllm_sources():
    import vllm

    root = Path(vllm.__file__).parent
    defining = {root.parent / (module.replace(".", "/") + ".py") for module in REPLACED}
    for part in PARTS:
        for path in sorted((root / part).rglob("*.py")):
            if path not in defining:
                yield path


def last_name(node):
    """Return block_pool for `self.block_pool` and `block_pool`, and block for `blocks[0]`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return (last_name(node.value) or "").removesuffix("s")
    return None


def used_names():
    """Return the attributes that vLLM's code uses, and where: class -> name -> place."""
    used = {name: {} for name in VARIABLES}
    for path in vllm_sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                variable = last_name(node.value)
                for class_name, variables in VARIABLES.items():
                    if variable in variables:
                        used[class_name].setdefault(node.attr, f"{path}:{node.lineno}")
    return used


def test_every_name_that_vllm_uses_exists():
    ours = make_one_of_each(load_ours())
    missing = [
        f"{class_name}.{name} ({place})"
        for class_name, names in used_names().items()
        for name, place in names.items()
        if not hasattr(ours[class_name], name) and name not in ADDED_BY_VLLM.get(class_name, ())
    ]
    assert not missing


def test_source_walk_finds_the_known_uses_in_vllm():
    used = used_names()
    assert {
        "get_new_blocks",
        "touch",
        "free_blocks",
        "cache_full_blocks",
        "cache_partial_block",
        "move_block_hashes",
        "unpin_blocks",
        "is_block_writable",
        "_insert_block_hash",
        "_maybe_evict_cached_block",
        "cached_block_hashes_by_block",
        "kv_event_queue",
        "null_block",
    } <= set(used["BlockPool"])
    assert {"block_id", "ref_cnt", "block_hash", "block_hash_num_tokens", "is_null"} <= set(
        used["KVCacheBlock"]
    )
    assert "iter_blocks_after" in used["FreeKVCacheBlockQueue"]
    assert "get_one_block" in used["BlockHashToBlockMap"]
    assert {"sample_rate", "drain_events"} <= set(used["KVCacheMetricsCollector"])


def test_all_attributes_of_vllm_classes_exist():
    theirs, ours = make_one_of_each(load_theirs()), make_one_of_each(load_ours())
    # Attributes added by dataclasses, and private state.
    missing = [
        f"{class_name}.{name}"
        for class_name, thing in theirs.items()
        for name in dir(thing)
        if not name.startswith("_") and not hasattr(ours[class_name], name)
    ]
    assert not missing


def test_all_classes_of_the_replaced_modules_are_replaced():
    for module_name in ("vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_metrics"):
        module = importlib.import_module(module_name)
        defined = {
            name
            for name, thing in vars(module).items()
            if isinstance(thing, type) and thing.__module__ == module_name
        }
        assert defined == set(REPLACED[module_name])


def methods_of(cls):
    """Return the constructor and all methods, including private ones, by name."""
    return {"__init__": cls} | {
        name: thing for name, thing in vars(cls).items() if inspect.isfunction(thing) and name[:2] != "__"
    }


def parameters(function):
    return [
        (parameter.name, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]


@pytest.mark.parametrize("class_name", [name for names in REPLACED.values() for name in names])
def test_parameters_match_those_of_vllm(class_name):
    """The parameters have the same names, order and defaults."""
    theirs, ours = load_theirs()[class_name], load_ours()[class_name]
    for name, method in methods_of(theirs).items():
        counterpart = ours if name == "__init__" else getattr(ours, name, None)
        if counterpart is None and name.startswith("_"):
            continue  # private, and unused according to the walk above
        expected = parameters(method)
        assert parameters(counterpart)[: len(expected)] == expected, f"{class_name}.{name}"
