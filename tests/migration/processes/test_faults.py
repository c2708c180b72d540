"""Migrations between two processes, with faults of the processes and of the network between them.

`KV_POOL_FAULT_SCHEDULES=1000 pytest tests/migration/processes` runs 1000 schedules, one per seed.
"""

import os
import time

import pytest
from migration.processes.rig import PATIENCE_S, Rig

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
NOTICED_S = 5.0  # as the guide says
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


@pytest.mark.parametrize("is_push", [False, True])
def test_a_killed_target_is_noticed_before_its_lease_ends(is_push):
    rig = Rig(lease_s=4 * PATIENCE_S)
    source, target = rig.nodes["a"], rig.nodes["b"]
    source.ask("begin", "r", list(range(40)))
    target.ask("pause_at", "in", "reading")
    starter, how, peer = (source, "migrate", "b") if is_push else (target, "fetch", "a")
    migration_id = starter.ask("migrate", how, "sequence", "r", [], peer, True)
    while not target.events.recv()[3]:
        pass
    target.kill()
    noticed_by = time.monotonic() + NOTICED_S
    phase = ""
    while phase != "failed":
        assert source.events.poll(noticed_by - time.monotonic()), "it was not noticed"
        _, phase, found_id, _ = source.events.recv()
        assert found_id == migration_id
    [status] = source.ask("list_statuses")
    assert "node 'b' has closed its connections" in status[-1]
    assert source.ask("check", [list(range(40))]) == ["r"]
    rig.start_node("b")
    rig.close()


@pytest.mark.nixl
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_NIXL_SCHEDULES))
def test_no_fault_loses_a_block_with_one_sided_reads(rigs, seed):
    """Only kills and suspensions: the bytes do not pass through the proxy."""
    run_schedule(rigs, seed, "nixl", lease_s=1.0, fault_kinds=("kill", "stop"))
