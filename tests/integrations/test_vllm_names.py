"""Every attribute that vLLM's code uses on the replaced classes exists in kv_pool, with vLLM's parameters.

Reads the source of the installed vLLM (marker `vllm`) and compares it with kv_pool's classes for its release.
"""

import importlib

import pytest
from integrations.vllm_names import find_changes, find_used_names

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("level", ["pool", "manager"])
def test_nothing_has_changed(level):
    assert find_changes(level) == []


def test_source_walk_finds_the_known_uses_in_vllm():
    used = find_used_names("pool") | find_used_names("manager")
    known = {
        "BlockPool": {"get_new_blocks", "move_block_hashes", "_insert_block_hash", "null_block"},
        "KVCacheBlock": {"block_id", "ref_cnt", "block_hash", "block_hash_num_tokens", "is_null"},
        "FreeKVCacheBlockQueue": {"iter_blocks_after"},
        "BlockHashToBlockMap": {"get_one_block"},
        "KVCacheMetricsCollector": {"drain_events"},
        "KVCacheManager": {"allocate_slots", "coordinator", "take_boundary_state_offloads", "usage"},
        "KVCacheCoordinator": {"enable_partial_hash_hits", "full_attention_group_id"},
        "SingleTypeKVCacheManager": {"block_size", "kv_cache_spec"},
        "KVCacheBlocks": {"blocks"},
    }
    assert {name: known[name] - set(used[name]) for name in known} == {name: set() for name in known}
    assert len(used["BlockPool"]) >= 13
    assert len(used["KVCacheManager"]) >= 20


def test_changes_are_listed_name_by_name(monkeypatch):
    module = importlib.import_module("vllm.v1.core.block_pool")
    manager = importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager

    def touch(self, blocks, weight=1): ...

    def compact(self): ...

    class RunIndex:
        __module__ = module.__name__

    monkeypatch.setattr(module.BlockPool, "touch", touch)
    monkeypatch.setattr(module.BlockPool, "compact", compact, raising=False)
    monkeypatch.setattr(module, "RunIndex", RunIndex, raising=False)
    monkeypatch.setattr(manager, "compact", compact, raising=False)
    assert find_changes("manager") == [
        "vllm.v1.core.block_pool.RunIndex is not replaced",
        "BlockPool.touch has the parameters (self, blocks, weight=1)",
        "BlockPool.compact is missing",
        "KVCacheManager.compact is missing",
    ]
    monkeypatch.delattr(module, "BlockHashToBlockMap")
    assert find_changes() == ["vllm.v1.core.block_pool.BlockHashToBlockMap is gone"]
