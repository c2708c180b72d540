"""Every attribute that vLLM's code uses on pools, blocks, queues, maps and collectors exists in kv_pool.

Reads the source of the installed vLLM (marker `vllm`) and compares it with kv_pool's classes for its release.
"""

import importlib

import pytest
from integrations.vllm_names import (
    find_changes,
    find_missing_attributes,
    find_other_classes,
    find_other_event_fields,
    find_other_parameters,
    find_unknown_uses,
    find_used_names,
    load_theirs,
)

from kv_pool.integrations.vllm.releases import POOL_LEVEL, REPLACED, find_release, load_classes

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def release():
    import vllm

    return find_release(vllm.__version__)


@pytest.fixture(scope="module")
def ours(release):
    return load_classes(release, "pool")


@pytest.fixture(scope="module")
def theirs():
    return load_theirs(POOL_LEVEL)


def test_every_name_that_vllm_uses_exists(ours):
    assert not find_unknown_uses(POOL_LEVEL, ours)


def test_source_walk_finds_the_known_uses_in_vllm():
    used = find_used_names(POOL_LEVEL)
    assert {"get_new_blocks", "move_block_hashes", "_insert_block_hash", "null_block"} <= set(
        used["BlockPool"]
    )
    assert len(used["BlockPool"]) >= 13
    assert {"block_id", "ref_cnt", "block_hash", "block_hash_num_tokens", "is_null"} <= set(
        used["KVCacheBlock"]
    )
    assert "iter_blocks_after" in used["FreeKVCacheBlockQueue"]
    assert "get_one_block" in used["BlockHashToBlockMap"]
    assert "drain_events" in used["KVCacheMetricsCollector"]


def test_all_attributes_of_vllm_classes_exist(theirs, ours):
    assert not find_missing_attributes(theirs, ours)


def test_all_classes_of_the_replaced_modules_are_replaced():
    assert not find_other_classes(POOL_LEVEL)


def test_parameters_match_those_of_vllm(theirs, ours):
    """The parameters have the same names, order and defaults."""
    assert not find_other_parameters(theirs, ours)


def test_events_have_the_fields_of_vllm(ours):
    assert not find_other_event_fields(ours["BlockPool"])


def test_nothing_has_changed():
    for level in REPLACED:
        assert find_changes(level) == []


def test_changes_are_listed_name_by_name(monkeypatch):
    module = importlib.import_module("vllm.v1.core.block_pool")

    def touch(self, blocks, weight=1): ...

    def compact(self): ...

    class RunIndex:
        __module__ = module.__name__

    monkeypatch.setattr(module.BlockPool, "touch", touch)
    monkeypatch.setattr(module.BlockPool, "compact", compact, raising=False)
    monkeypatch.setattr(module, "RunIndex", RunIndex, raising=False)
    assert find_changes() == [
        "vllm.v1.core.block_pool.RunIndex is not replaced",
        "BlockPool.touch has the parameters (self, blocks, weight=1)",
        "BlockPool.compact is missing",
    ]
    monkeypatch.delattr(module, "BlockHashToBlockMap")
    assert find_changes() == ["vllm.v1.core.block_pool.BlockHashToBlockMap is gone"]
