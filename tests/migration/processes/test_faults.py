"""Migrations between two processes, with faults of the processes and of the network between them.

`KV_POOL_FAULT_SCHEDULES=1000 pytest tests/migration/processes` runs 1000 schedules, one per seed.
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
    """One rig per backend, shared by all schedules until one fails."""
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
def test_no_fault_loses_or_shares_a_block(rigs, seed):
    run_schedule(rigs, seed, "tcp")


@pytest.mark.nixl
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_NIXL_SCHEDULES))
def test_no_fault_loses_a_block_with_one_sided_reads(rigs, seed):
    """Only kills and suspensions: the bytes do not pass through the proxy."""
    run_schedule(rigs, seed, "nixl", lease_s=1.0, fault_kinds=("kill", "stop"))
