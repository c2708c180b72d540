"""Random calls on kv_pool's classes and on vLLM 0.33's: same results, same state, same events.

Runs if vLLM's core can be imported (marker `vllm`); otherwise `conftest.py` skips it, and
`test_recorded_parity.py` replays a recorded part of it.
"""

import pytest
from core.part_operations import PartSide
from core.part_schedule import PartSchedule
from core.plain_operations import agree, find_differences, run
from core.pool_operations import PoolSide
from core.pool_schedule import PoolSchedule

import kv_pool

pytestmark = pytest.mark.vllm

NUM_STEPS = 400


def compare(side_class, schedule):
    from core import vllm_classes

    theirs = side_class(vllm_classes, schedule.options)
    ours = side_class(kv_pool, schedule.options)
    assert theirs.picture() == ours.picture()
    for operation, answers in run(schedule, theirs, ours, num_steps=NUM_STEPS):
        assert agree(*answers), operation
        their_picture, our_picture = theirs.picture(), ours.picture()
        if their_picture != our_picture:
            pytest.fail("\n".join([f"after {operation}", *find_differences(their_picture, our_picture)]))


@pytest.mark.parametrize("seed", range(300))
def test_random_calls_on_pools_agree_with_vllm(seed):
    compare(PoolSide, PoolSchedule(seed))


@pytest.mark.parametrize("seed", range(100))
def test_random_calls_on_queue_map_and_block_agree_with_vllm(seed):
    compare(PartSide, PartSchedule(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_more_random_calls_on_pools_agree_with_vllm(seed):
    compare(PoolSide, PoolSchedule(seed))


def test_every_public_method_of_vllm_has_an_operation():
    from core import vllm_classes

    covered = {
        "BlockPool": PoolSide,
        "BlockHashToBlockMap": PartSide,
        "FreeKVCacheBlockQueue": PartSide,
        "KVCacheBlock": PartSide,
    }
    for name, side_class in covered.items():
        for parent in getattr(vllm_classes, name).__mro__[:-1]:
            for method, value in vars(parent).items():
                if callable(value) and not method.startswith("_"):
                    assert hasattr(side_class, method), f"{name}.{method}"
