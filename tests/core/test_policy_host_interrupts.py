"""Calls on a pool with a cache policy that a signal handler interrupts: pool and runs stay consistent."""

import random

import pytest
from core.policy_pool import HASHER, make_manager, run, start
from drawing import blocks
from interrupting import interrupt_everywhere, interrupt_twice_at_random

from kv_pool import BlockPool, Request
from kv_pool.contiguous import invariants as run_invariants
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants

KINDS = {"plain": BlockPool, "runs": RunBlockPool}
NUM_BLOCKS = 16


def make(pool_type, policy="s3fifo"):
    """Return a manager with two free sequences and a running request that share a prefix, and another one."""
    manager = make_manager(NUM_BLOCKS, policy, pool_type)
    run(manager, "a", range(20))
    run(manager, "b", [*range(12), *range(50, 58)])
    manager.running = start(manager, "c", [*range(9), *range(70, 80)])[0]
    run(manager, "d", range(100, 112))
    return manager


def free_listed(manager):
    pool = manager.block_pool
    taken = pool.get_new_blocks(3)
    pool.cache_partial_block(manager.running, taken[0], 4, 0, 4)
    pool.free_blocks(taken)


def unpin(manager):
    pool = manager.block_pool
    pool.unpin_blocks(pool.get_new_blocks(2), lambda block: None)


def touch(manager):
    pool = manager.block_pool
    found = pool.find_cached_prefix(manager.running.block_hashes, 3)
    pool.touch(found)
    pool.free_blocks(found[::-1])


def take_listed(manager):
    pool = manager.block_pool
    free = pool.free_block_queue.get_all_free_blocks()[-3:]
    pool.take_blocks(free)
    pool.free_blocks(free)


CALLS = {
    "start": lambda manager: start(manager, "e", [*range(16), *range(90, 98)]),
    "start, most": lambda manager: start(manager, "e", range(200, 240)),
    "free": lambda manager: manager.free(manager.running),
    "run": lambda manager: run(manager, "e", [*range(14), *range(30, 60)]),
    "free_blocks": free_listed,
    "unpin_blocks": unpin,
    "touch": touch,
    "take_blocks": take_listed,
    "evict_blocks": lambda manager: manager.block_pool.evict_blocks([1, 2, 6]),
    "add_blocks": lambda manager: manager.block_pool.add_blocks(2),
    "unchain": lambda manager: manager.block_pool.policy_host.unchain(0),
}


def check(manager):
    """Check the invariants, then that all blocks can still be used, and that nothing was lost."""
    pool = manager.block_pool
    check_pool(pool)
    run(manager, "first", [1])  # completes an interrupted call of the manager
    for name in list(manager._tables):
        manager.free(Request(name, [1], HASHER))
    check_pool(pool)
    in_use = [block for block in pool.blocks[1:] if block.ref_cnt]
    pool.free_blocks(in_use)  # taken by a call on the pool that was interrupted before it returned them
    check_pool(pool)
    run(manager, "last", range(300, 300 + 4 * (pool.num_gpu_blocks - 1)))
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    check_pool(pool)
    assert pool.policy_host.failure is None


def check_pool(pool):
    (run_invariants if isinstance(pool, RunBlockPool) else invariants).check(pool)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_runs_are_sound_after_an_interrupt_at_any_moment(name, kind):
    tried, broken = interrupt_everywhere(lambda: make(KINDS[kind]), CALLS[name], check)
    assert not broken, f"{name}, {kind}: {len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_runs_are_sound_after_an_interrupted_recovery(name, kind):
    rng = random.Random(f"{name}, {kind}")
    tried, broken = interrupt_twice_at_random(lambda: make(KINDS[kind]), CALLS[name], check, rng, 40)
    assert not broken, f"{name}, {kind}: {len(broken)} of {tried}: {broken[:3]}"


def test_a_recovered_lru_keeps_its_order():
    manager = make(BlockPool, "lru")
    pool = manager.block_pool
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    pool.policy_host.recover()
    taken = [block.block_id for block in pool.get_new_blocks(len(order))]
    assert taken == order
    pool.free_blocks(blocks(pool, *taken))
    invariants.check(pool)
