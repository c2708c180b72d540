"""A pytest plugin for vLLM's tests that selects their classes before the first test is imported."""

import gc
import os
import time
import types

import pytest
import vllm.distributed.parallel_state
import vllm.transformers_utils.repo_utils
import vllm.v1.core.block_pool
import vllm.v1.core.kv_cache_manager

from kv_pool.integrations.vllm import register

# The UMBP connector's tests require ROCm, but then use a runtime that copies bytes on the CPU.
NOT_SKIPPED = "UMBP is only available on ROCm"

# Without a network, vLLM would wait four seconds in each test that makes a scheduler.
WITHOUT_SLEEP = vars(time) | {"sleep": lambda seconds: None}
vllm.transformers_utils.repo_utils.time = types.SimpleNamespace(**WITHOUT_SLEEP)

# vLLM collects garbage after each test: half a second with everything that is imported, unless it is frozen.
# vLLM unfreezes it first; a process that runs tests keeps its modules.
STILL_FROZEN = vars(gc) | {"unfreeze": lambda: None}
vllm.distributed.parallel_state.gc = types.SimpleNamespace(**STILL_FROZEN)


def pytest_configure(config):
    # Only for this call: some tests register their own plugins, which need VLLM_PLUGINS unset.
    expected = os.environ["CLASSES_UNDER_TEST"]
    os.environ["VLLM_PLUGINS"] = expected
    register()
    del os.environ["VLLM_PLUGINS"]
    expect_owner(vllm.v1.core.block_pool.BlockPool, expected)
    is_manager_ours = expected == "kv_pool" and os.environ.get("KV_POOL_VLLM") == "manager"
    expect_owner(vllm.v1.core.kv_cache_manager.KVCacheManager, "kv_pool" if is_manager_ours else "vllm")


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


def expect_owner(tested, expected):
    owner = tested.__module__.partition(".")[0]
    if owner != expected:
        pytest.exit(f"the tests would run with {owner}'s {tested.__name__}", returncode=3)


def pytest_collection_modifyitems(items):
    for module in {item.getparent(pytest.Module) for item in items}:
        module.own_markers[:] = [
            mark for mark in module.own_markers if NOT_SKIPPED not in mark.kwargs.get("reason", "")
        ]
