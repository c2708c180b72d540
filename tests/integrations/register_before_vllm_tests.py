"""A pytest plugin for vLLM's tests: kv_pool's classes are in place before the first of them is imported."""

import pytest
import vllm.v1.core.block_pool

from kv_pool.integrations.vllm import register


def pytest_configure(config):
    register()
    pool = vllm.v1.core.block_pool.BlockPool
    if not pool.__module__.startswith("kv_pool."):
        pytest.exit(f"the tests would run with {pool.__module__}.BlockPool", returncode=3)
