"""The connector works the same over vLLM's pool and over kv_pool's; there, stores have leases."""

import pytest
from integrations.vllm_process import run_program

pytestmark = pytest.mark.vllm


def run(folder, plugins):
    return run_program("vllm_connector/connector_life.py", folder, plugins)[0]


def test_the_pool_changes_nothing_but_the_holds(tmp_path):
    theirs, ours = run(tmp_path / "theirs", ""), run(tmp_path / "ours", "kv_pool")
    for life in theirs:
        assert life.pop("pool") == "vllm.v1.core.block_pool"
        assert life.pop("holds") == []
    for life in ours:
        assert life.pop("pool") == "kv_pool.integrations.vllm.pool_classes"
        assert "leased to kv_pool's tiers" in life.pop("holds")
    assert ours == theirs
    assert all(life["counts"]["external"] for life in ours)
