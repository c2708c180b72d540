"""What every test needs: the mode check, and which tests this machine can run."""

import importlib
import importlib.util
import os
import warnings

import kv_pool

EXPECTED_MODE = os.environ.get("KV_POOL_EXPECT")


def pytest_configure(config):
    mode = "compiled" if kv_pool.COMPILED else "plain"
    if EXPECTED_MODE not in (None, mode):
        raise RuntimeError(f"expected the {EXPECTED_MODE} core, this is the {mode} one: {kv_pool.__file__}")


def can_import_vllm():
    """Is vLLM's core here, with everything it imports?"""
    if importlib.util.find_spec("vllm") is None:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of its imports are none of ours
            importlib.import_module("vllm.v1.core.block_pool")
    except ImportError:
        return False
    return True


def pytest_collection_modifyitems(config, items):
    if not can_import_vllm():
        kept = [item for item in items if item.get_closest_marker("vllm") is None]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_report_header(config):
    return f"kv_pool {kv_pool.__version__}, core {'compiled' if kv_pool.COMPILED else 'plain'}"
