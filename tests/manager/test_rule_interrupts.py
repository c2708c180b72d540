"""Calls of a manager with `PrefixRules` that a signal handler interrupts."""

import pytest
from interrupting import interrupt_everywhere

from kv_pool import BlockHasher, BlockPool, FullAttentionSpec, KVCacheManager, MambaSpec, PrefixRules, Request
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.manager import invariants

HASHER = BlockHasher(block_size=2)
POOLS = {"blocks": BlockPool, "runs": RunBlockPool}
FULL = FullAttentionSpec(block_size=4)
STATES = {
    "plain": MambaSpec(block_size=4),
    "drafts": MambaSpec(block_size=4, num_speculative_blocks=2),
    "checkpoints": MambaSpec(block_size=4, prefill_checkpoint_alignment=2),
}
NUM_COMPUTED = {"old": 11, "running": 10, "new": 0}


def make(pool_class, states):
    """Three requests: one freed, whose prompt ends within a block; one whose prompt just ended; a new one."""
    pool = pool_class(40, True, 2, enable_kv_cache_events=True)
    manager = KVCacheManager(pool, groups=[FULL, STATES[states]], prefix_rules=PrefixRules())
    requests = {
        "old": Request("old", range(11), HASHER),
        "running": Request("running", range(100, 111), HASHER),
        "new": Request("new", [*range(10), *range(50, 70)], HASHER),
    }
    for name, ends in (("old", (8, 10, 11)), ("running", (8, 10))):
        for end in ends:
            manager.allocate_slots(requests[name], end - requests[name].num_computed_tokens)
            manager.take_block_copies()
            requests[name].num_computed_tokens = end
    manager.free(requests["old"])
    requests["old"].num_computed_tokens = 0
    requests["running"].append_output_token_ids(range(20))
    manager.take_events()
    return manager, requests, []


def admit(manager, requests, retained):
    manager.allocate_slots(requests["new"], 2, manager.get_computed_blocks(requests["new"]))


def admit_and_copy(manager, requests, retained):
    admit(manager, requests, retained)
    manager.take_block_copies()


def grow(manager, requests, retained):
    manager.allocate_slots(requests["running"], 14)


def grow_and_copy(manager, requests, retained):
    grow(manager, requests, retained)
    manager.take_block_copies_onto(retained)
    manager.free_out_of(retained)


CALLS = {
    "admitted within a block": admit,
    "admitted, copies taken": admit_and_copy,
    "growing after the prompt": grow,
    "growing, copies kept": grow_and_copy,
    "releasing": lambda manager, requests, _: manager.release_skipped_blocks(requests["running"], 10),
    "freed": lambda manager, requests, _: manager.free(requests["running"]),
}


@pytest.mark.parametrize("pool", ["blocks", pytest.param("runs", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "states", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("drafts", "checkpoints"))]
)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_a_request_all_blocks_or_none(name, states, pool):
    num_speculative = STATES[states].num_speculative_blocks

    def check(made):
        manager, requests, retained = made
        manager.free_out_of(retained)
        invariants.check_manager(manager, requests.values())
        for request_id in manager.list_request_ids():
            for group_id, num_more in ((0, 0), (1, num_speculative)):
                num_blocks = len(manager.get_table(request_id, group_id).blocks) - num_more
                assert num_blocks * 4 >= requests[request_id].num_computed_tokens
        if "running" in manager.list_request_ids() and not name.startswith("growing"):
            assert len(manager.get_table("running", 1).blocks) == 3 + num_speculative
        # What is cached has been computed, or is about to be copied.
        assert manager.get_computed_blocks(requests["new"]).num_tokens <= 10
        manager.take_block_copies()
        if "running" in manager.list_request_ids():
            requests["running"].num_computed_tokens = 10
            assert manager.allocate_slots(requests["running"], 14) is not None
            requests["running"].num_computed_tokens = 24
            manager.take_block_copies()
            manager.free(requests["running"])
        if "new" in manager.list_request_ids():
            manager.free(requests["new"])
        assert manager.get_num_free_blocks() == 39
        invariants.check_manager(manager, [])

    tried, broken = interrupt_everywhere(
        lambda: make(POOLS[pool], states), lambda made: CALLS[name](*made), check
    )
    assert not broken, f"{name}: {len(broken)} of {tried}: {broken[:3]}"
