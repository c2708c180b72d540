"""Random calls on kv_pool's classes and on those of the installed vLLM: same results, state and events.

Runs if vLLM's core can be imported (marker `vllm`); otherwise `conftest.py` skips it, and
`test_recorded_parity.py` replays a recorded part of it.
"""

from types import SimpleNamespace

import pytest
from core.plain_operations import agree, find_differences, run
from core.pool_operations import PoolSide
from core.pool_schedule import PoolSchedule

from kv_pool import BlockHashToBlockMap, FreeKVCacheBlockQueue, KVCacheBlock
from kv_pool.integrations.vllm.releases import find_release, load_classes

pytestmark = pytest.mark.vllm

NUM_STEPS = 400


@pytest.fixture(scope="module")
def release():
    import vllm

    return find_release(vllm.__version__)


def compare(schedule):
    from core import vllm_classes

    our_classes = SimpleNamespace(BlockStored=vllm_classes.BlockStored, **load_classes("pool"))
    theirs = PoolSide(vllm_classes, schedule.options)
    ours = PoolSide(our_classes, schedule.options)
    assert theirs.picture() == ours.picture()
    for operation, answers in run(schedule, theirs, ours, num_steps=NUM_STEPS):
        assert agree(*answers), operation
        their_picture, our_picture = theirs.picture(), ours.picture()
        if their_picture != our_picture:
            pytest.fail("\n".join([f"after {operation}", *find_differences(their_picture, our_picture)]))


@pytest.mark.parametrize("seed", range(300))
def test_random_calls_on_pools_agree_with_vllm(release, seed):
    compare(PoolSchedule(seed, release))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_more_random_calls_on_pools_agree_with_vllm(release, seed):
    compare(PoolSchedule(seed, release))


def test_every_public_method_of_vllm_is_here():
    from core import vllm_classes

    parts = (BlockHashToBlockMap, FreeKVCacheBlockQueue, KVCacheBlock)
    for name, ours in {"BlockPool": PoolSide, **{part.__name__: part for part in parts}}.items():
        for parent in getattr(vllm_classes, name).__mro__[:-1]:
            for method, value in vars(parent).items():
                if callable(value) and not method.startswith("_"):
                    assert hasattr(ours, method), f"{name}.{method}"
