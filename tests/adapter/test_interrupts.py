"""Calls of a `GPUKVPool` interrupted by a signal handler: references and holders agree afterwards."""

import contextlib
import itertools
import random

import pytest
from adapter.made_pool import check, make, make_scattered, take
from interrupting import alarm_that_raises, interrupt_everywhere, interrupt_twice, run_until_interrupted

from kv_pool import BlockAllocationRequest, LRUEviction
from kv_pool.errors import KVPoolError
from kv_pool.manager.retention.directive import RetentionDirective

HASHES = [b"hash %d" % number for number in range(4)]


def ignore_move(relocation):
    pass


def make_busy(**options):
    """Make sequences with shared, pinned and high-priority blocks, and free cached blocks."""
    pool = make(16, on_moved=ignore_move, eviction_policy=LRUEviction(), **options)
    take(pool, 1, 4)
    pool.cache_prefix(1, HASHES[:3])
    pool.fork(1, 2, 3)
    take(pool, 3, 2, priority=2)
    pool.cache_prefix(3, [b"urgent"])
    pool.free_sequence(3)
    take(pool, 9, 1)
    pool.cache_prefix(9, [b"kept"])
    pool.retention.set_directives("9", [RetentionDirective(0, 4, pin=True)])
    pool.free_sequence(9)
    pool.retention.set_directives("2", [RetentionDirective(4, priority=80, duration_s=100.0)])
    take(pool, 4, 3)
    pool.pin(pool.blocks_of(4)[:1])
    take(pool, 5, 2)
    pool.free(pool.blocks_of(5)[:1])
    return pool


CALLS = {
    "allocate": lambda pool: take(pool, 6, 3),
    "allocate, growing": lambda pool: take(pool, 1, 2),
    "allocate, pinned": lambda pool: take(pool, 6, 2, pinned=True),
    "allocate, all": lambda pool: take(pool, 6, pool.get_free_blocks(), contiguous="no"),
    "allocate, evicting": lambda pool: take(pool, 6, pool.get_free_blocks() + 2),
    "allocate, a run": lambda pool: take(pool, 6, 6, contiguous="require"),
    "allocate_many": lambda pool: pool.allocate_many(
        [BlockAllocationRequest(2, 6), BlockAllocationRequest(1, 7, pinned=True)]
    ),
    "fork": lambda pool: pool.fork(1, 8),
    "claim_prefix": lambda pool: pool.claim_prefix(8, HASHES),
    "claim_prefix, free": lambda pool: pool.claim_prefix(8, [b"urgent"]),
    "cache_prefix": lambda pool: pool.cache_prefix(1, HASHES),
    "free": lambda pool: pool.free(pool.blocks_of(1)[1:]),
    "free, by one": lambda pool: pool.free(pool.blocks_of(2)[1:], 2),
    "free_sequence": lambda pool: pool.free_sequence(1),
    "free_sequence, directives": lambda pool: pool.free_sequence(2),
    "claim_prefix, kept": lambda pool: pool.claim_prefix(8, [b"kept"]),
    "evict": lambda pool: pool.evict(4),
    "pin": lambda pool: pool.pin([*pool.blocks_of(1), pool.blocks_of(4)[0]]),
    "unpin": lambda pool: pool.unpin(pool.blocks_of(4)[:1]),
    "note_access": lambda pool: pool.note_access(1),
    "defragment": lambda pool: pool.defragment(),
    "grow": lambda pool: pool.grow(3),
    "shrink": lambda pool: pool.shrink(2),
}


def describe(pool):
    held = {sequence_id: len(pool.blocks_of(sequence_id)) for sequence_id in pool.list_sequences()}
    return sorted(held.items()), pool.num_pinned_blocks, pool.total_blocks


@pytest.mark.parametrize(
    "make_one", [make_busy, pytest.param(make_scattered, marks=pytest.mark.slow)], ids=["busy", "scattered"]
)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaks_no_block(name, make_one):
    """A fragmented pool refuses four of the calls; the refusals are also interrupted."""
    options = {"enable_kv_cache_events": True}

    def call(pool):
        try:
            CALLS[name](pool)
        except KVPoolError:
            assert make_one is make_scattered

    def make_pool():
        return make_one(**options)

    reference = make_pool()
    states = [describe(reference)]
    call(reference)
    states.append(describe(reference))

    def check_pool(pool):
        pool.block_pool.get_new_blocks(0)
        check(pool)
        assert not pool.block_pool.holds.list_immovable_ids() or pool.num_pinned_blocks
        if name not in ("evict", "allocate, evicting", "allocate, a run"):  # one sequence after the other
            assert describe(pool) in states

    tried, broken = interrupt_everywhere(make_pool, call, check_pool)
    assert tried > 0
    assert not broken, f"{name}: {len(broken)} of {tried}: {broken[:3]}"


NEXT_CALLS = {
    "pin": lambda pool: pool.pin(pool.blocks_of(5)),
    "unpin": lambda pool: pool.unpin(pool.blocks_of(4)[:1]),
    "note_access": lambda pool: pool.note_access(2),
    "defragment": lambda pool: pool.defragment(),
    "list_sequences": lambda pool: pool.list_sequences(),
    "get_block_info": lambda pool: pool.get_block_info(1),
    "get_layout": lambda pool: pool.get_layout(),
    "get_statistics": lambda pool: pool.get_statistics(),
    "claim_prefix": lambda pool: pool.claim_prefix(99, [b"not cached"]),
    "allocate": lambda pool: take(pool, 98, 1),
    "the lock": lambda pool: pool.lock.__enter__() and pool.lock.__exit__(None, None, None),
}


@pytest.mark.parametrize(
    "second_step", [7, pytest.param(1, marks=pytest.mark.slow)], ids=["some moments", "all moments"]
)
@pytest.mark.parametrize("name", CALLS)
def test_any_call_completes_an_interrupted_recovery(name, second_step):
    next_calls = itertools.cycle(NEXT_CALLS.values())

    def watch(pool, second):
        recover = pool._recover

        def recover_watched(error):
            second()
            recover(error)

        pool._recover = recover_watched

    def check_pool(pool):
        with contextlib.suppress(KVPoolError):
            next(next_calls)(pool)
        pool.block_pool.get_new_blocks(0)
        check(pool)
        assert not pool.lock.is_unfinished
        assert pool.lock.acquire(blocking=False)
        pool.lock.release()
        assert not pool.lock._is_owned()

    tried, broken = interrupt_twice(make_busy, CALLS[name], check_pool, watch, 23, second_step)
    assert not broken, f"{name}: {len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("seed", range(5))
def test_signals_at_random_times_leak_no_block(seed):
    rng = random.Random(seed)
    pool = make_busy()
    sequence_ids = range(1, 12)

    def step():
        name = rng.choice(["take", "take", "free", "fork", "pin", "defragment"])
        sequence_id = rng.choice(sequence_ids)
        try:
            held = pool.blocks_of(sequence_id)
            if name == "take":
                take(pool, sequence_id, rng.randint(1, 4), pinned=rng.random() < 0.2)
            elif name == "free":
                pool.free_sequence(sequence_id)
            elif name == "fork":
                pool.fork(sequence_id, rng.choice(sequence_ids))
            elif name == "pin" and held:
                (pool.pin if rng.random() < 0.5 else pool.unpin)(held[:2])
            elif name == "defragment":
                pool.defragment()
        except KVPoolError:
            pass

    with alarm_that_raises():
        for _ in range(100):
            run_until_interrupted(step, rng)
            pool.note_access(next(iter(pool.list_sequences()), None)) if pool.list_sequences() else None
            check(pool)
