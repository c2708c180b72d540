"""Calls of a `KVCacheManager` that a signal handler breaks off: a request has all of its blocks, or none."""

import pytest
from interrupting import interrupt_everywhere

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.manager import invariants
from kv_pool.manager.kv_cache_spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec

HASHER = BlockHasher(block_size=4)
POOLS = {"blocks": BlockPool, "runs": RunBlockPool}
GROUPS = {
    "full": None,
    "window": [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=6)],
    "states": [FullAttentionSpec(block_size=4), MambaSpec(block_size=4)],
}


def make(pool_class, groups):
    """Three requests: one freed, whose prefix is cached; one that runs, and a fork of it."""
    pool = pool_class(40, True, 4, enable_kv_cache_events=True)
    manager = KVCacheManager(pool, groups=groups) if groups else KVCacheManager(pool)
    requests = {name: Request(name, range(30), HASHER) for name in ("old", "new")}
    for name in ("running", "fork"):
        requests[name] = Request(name, range(100, 130), HASHER)
    manager.requests = requests
    step(manager, "old", 24)
    manager.free(requests["old"])
    requests["old"].num_computed_tokens = 0
    step(manager, "running", 18)
    requests["fork"].num_computed_tokens = 18
    manager.fork(requests["running"], requests["fork"])
    manager.take_events()
    return manager


def step(manager, name, num_tokens, prefix=None):
    request = manager.requests[name]
    manager.allocate_slots(request, num_tokens, prefix)
    manager.take_block_copies()
    request.num_computed_tokens += num_tokens + (prefix.num_tokens if prefix else 0)


def admit(manager):
    request = manager.requests["new"]
    manager.allocate_slots(request, 6, manager.get_computed_blocks(request))


CALLS = {
    "admitted": admit,
    "growing": lambda manager: manager.allocate_slots(manager.requests["running"], 10),
    "writing to shared blocks": lambda manager: manager.allocate_slots(manager.requests["fork"], 1),
    "freed": lambda manager: manager.free(manager.requests["running"]),
    "copies taken": lambda manager: (
        manager.allocate_slots(manager.requests["fork"], 1),
        manager.take_block_copies(),
    ),
    "freed with copies to be made": lambda manager: (
        manager.allocate_slots(manager.requests["fork"], 1),
        manager.free(manager.requests["fork"]),
    ),
}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_each_request_with_all_blocks_or_none(name, pool, groups):
    def check(manager):
        invariants.check_manager(manager, manager.requests.values())
        before = {"running": 5, "fork": 5}
        for request_id in manager.list_request_ids():
            table = manager.get_table(request_id)
            request = manager.requests[request_id]
            assert len(table.blocks) * 4 >= request.num_computed_tokens
            if request_id == "running" and name != "growing":
                assert len(table.blocks) == before["running"]
        # What nobody computes is not findable.
        if "new" not in manager.list_request_ids():
            assert manager.get_computed_blocks(manager.requests["new"]).num_tokens <= 24
        manager.allocate_slots(manager.requests["old"], 4)
        invariants.check_manager(manager, manager.requests.values())

    tried, broken = interrupt_everywhere(lambda: make(POOLS[pool], GROUPS[groups]), CALLS[name], check)
    assert not broken, f"{name}: {len(broken)} of {tried}: {broken[:3]}"
