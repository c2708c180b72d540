"""Two processes, and all that can befall them and what is between them.

`KV_POOL_FAULT_SCHEDULES=1000 pytest tests/migration/processes` runs as many; a seed is one schedule.
"""

import os

import pytest
from migration.processes.rig import Rig

FIRST_SEED = int(os.environ.get("KV_POOL_FAULT_FIRST_SEED", "0"))
ASKED_FOR = os.environ.get("KV_POOL_FAULT_SCHEDULES")
NUM_SCHEDULES = int(ASKED_FOR or 40)
NUM_MORE = 0 if ASKED_FOR else 160
SEEDS = [
    *range(FIRST_SEED, FIRST_SEED + NUM_SCHEDULES),
    *(
        pytest.param(seed, marks=pytest.mark.slow)
        for seed in range(FIRST_SEED + NUM_SCHEDULES, FIRST_SEED + NUM_SCHEDULES + NUM_MORE)
    ),
]
NUM_NIXL_SCHEDULES = int(os.environ.get("KV_POOL_NIXL_FAULT_SCHEDULES", "12"))


@pytest.fixture(scope="module")
def rigs():
    """By backend one for all schedules, until one fails."""
    made = {}
    yield made
    for rig in made.values():
        rig.close()


def run_schedule(rigs, seed, backend, **options):
    rig = rigs.pop(backend, None) or Rig(backend, **options)
    try:
        rig.run(seed)
    except BaseException:
        rig.close()
        raise
    rigs[backend] = rig


@pytest.mark.parametrize("seed", SEEDS)
def test_no_block_is_lost_or_used_twice_whatever_happens(rigs, seed):
    run_schedule(rigs, seed, "tcp")


@pytest.mark.nixl
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_NIXL_SCHEDULES))
def test_nor_when_the_target_reads_the_memory_of_the_source_by_itself(rigs, seed):
    """Killed and stopped only: the bytes do not pass through the proxy."""
    run_schedule(rigs, seed, "nixl", lease_s=1.0, fault_kinds=("kill", "stop"))
