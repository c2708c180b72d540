"""Calls of a `KVCacheManager` that a signal handler interrupts: a request has all of its blocks, or none."""

import pytest
from interrupting import interrupt_everywhere

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.manager import invariants
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec

HASHER = BlockHasher(block_size=4)
POOLS = {"blocks": BlockPool, "runs": RunBlockPool}
GROUPS = {
    "full": None,
    "window": [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=6)],
    "states": [FullAttentionSpec(block_size=4), MambaSpec(block_size=4)],
}


def make(pool_class, groups):
    """Three requests: one freed, whose prefix is cached; one that runs; and a fork of it."""
    pool = pool_class(40, True, 4, enable_kv_cache_events=True)
    manager = KVCacheManager(pool, groups=groups) if groups else KVCacheManager(pool)
    requests = {name: Request(name, range(30), HASHER) for name in ("old", "new")}
    for name in ("running", "fork"):
        requests[name] = Request(name, range(100, 130), HASHER)
    for name, num_tokens in (("old", 24), ("running", 18)):
        manager.allocate_slots(requests[name], num_tokens)
        manager.take_block_copies()
        requests[name].num_computed_tokens = num_tokens
    manager.free(requests["old"])
    requests["old"].num_computed_tokens = 0
    requests["fork"].num_computed_tokens = 18
    manager.fork(requests["running"], requests["fork"])
    manager.take_events()
    return manager, requests


def admit(manager, requests):
    manager.allocate_slots(requests["new"], 6, manager.get_computed_blocks(requests["new"]))


def write_and_copy(manager, requests):
    manager.allocate_slots(requests["fork"], 1)
    manager.take_block_copies()


def write_and_free(manager, requests):
    manager.allocate_slots(requests["fork"], 1)
    manager.free(requests["fork"])


CALLS = {
    "admitted": admit,
    "growing": lambda manager, requests: manager.allocate_slots(requests["running"], 10),
    "writing to shared blocks": lambda manager, requests: manager.allocate_slots(requests["fork"], 1),
    "freed": lambda manager, requests: manager.free(requests["running"]),
    "copies taken": write_and_copy,
    "freed with copies to be made": write_and_free,
}


@pytest.mark.parametrize(
    "groups", ["full", *(pytest.param(name, marks=pytest.mark.slow) for name in ("window", "states"))]
)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_a_request_all_blocks_or_none(name, pool, groups):
    def check(made):
        manager, requests = made
        invariants.check_manager(manager, requests.values())
        for request_id in manager.list_request_ids():
            table = manager.get_table(request_id)
            assert len(table.blocks) * 4 >= requests[request_id].num_computed_tokens
            if request_id == "running" and name != "growing":
                assert len(table.blocks) == 5
        # Blocks that no step will compute are not cached.
        if "new" not in manager.list_request_ids():
            assert manager.get_computed_blocks(requests["new"]).num_tokens <= 24
        manager.allocate_slots(requests["old"], 4)
        invariants.check_manager(manager, requests.values())

    tried, broken = interrupt_everywhere(
        lambda: make(POOLS[pool], GROUPS[groups]), lambda made: CALLS[name](*made), check
    )
    assert not broken, f"{name}: {len(broken)} of {tried}: {broken[:3]}"
