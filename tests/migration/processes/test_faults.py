"""Two processes, and all that can befall them and what is between them.

`KV_POOL_FAULT_SCHEDULES=1000 pytest tests/migration/processes` runs as many; a seed is one schedule.
"""

import os

import pytest
from migration.processes.rig import Rig

NUM_SCHEDULES = int(os.environ.get("KV_POOL_FAULT_SCHEDULES", "40"))
FIRST_SEED = int(os.environ.get("KV_POOL_FAULT_FIRST_SEED", "0"))


@pytest.fixture(scope="module")
def rigs():
    """One rig for all schedules, until one fails."""
    made = []
    yield made
    for rig in made:
        rig.close()


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SCHEDULES))
def test_no_block_is_lost_or_used_twice_whatever_happens(rigs, seed):
    if not rigs:
        rigs.append(Rig())
    rig = rigs.pop()
    try:
        rig.run(seed)
    except BaseException:
        rig.close()
        raise
    rigs.append(rig)
