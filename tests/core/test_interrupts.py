"""Calls that a signal handler interrupts: each takes effect completely or not at all."""

import random

import pytest
from drawing import GROUP, blocks, hash_of, make_pool, make_request, state
from interrupting import alarm_that_raises, interrupt_everywhere, interrupt_twice, run_until_interrupted

from kv_pool import COMPILED, AllBlocksCleared, BlockPool, BlockRemoved, KVCacheMetricsCollector
from kv_pool.contiguous import invariants as run_invariants
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants
from kv_pool.core.pool_state import ReuseWatcher

PICTURE = "free: 3 4 1* 2* 7 9* | in use: 5 6*x2 8* 10x3 11"


def ignore_reuse(block):
    pass


def cache_three(pool):
    request = make_request([hash_of(number) for number in (20, 21, 22)])
    pool.cache_full_blocks(request, blocks(pool, 5, 0, 10), 0, 3, 4, 0)


def cache_a_copy(pool):
    pool.cache_full_blocks(make_request([hash_of(1), hash_of(9)]), blocks(pool, 5, 10), 0, 2, 4, 0)


def promote(pool):
    pool.cache_full_blocks(make_request([hash_of(20), hash_of(21)]), blocks(pool, 5, 11), 0, 2, 4, 0)


def add_secondary_key(pool):
    pool.cache_partial_block(make_request([hash_of(40)]), pool.blocks[8], 4, 0, 4)


def evict_several_keys(pool):
    pool.evict_blocks([1, 8, 9, 6])


def move_keys(pool):
    pool.move_block_hashes(pool.blocks[8], pool.blocks[5])


def swap_ids(pool):
    pool.swap_block_ids([(5, 1), (8, 9), (10, 4)])


FREED_FIRST = {"reset_prefix_cache": [5, 6, 6, 8, 10, 10, 10, 11], "remove_last_blocks": [11, 10, 10, 10]}


def reset(pool):
    pool.free_blocks(blocks(pool, *FREED_FIRST["reset_prefix_cache"]))
    pool.reset_prefix_cache()


def remove_two(pool):
    pool.free_blocks(blocks(pool, *FREED_FIRST["remove_last_blocks"]))
    pool.remove_last_blocks(2)


CALLS = {
    "get_new_blocks": lambda pool: pool.get_new_blocks(4),
    "get_new_blocks, all": lambda pool: pool.get_new_blocks(6),
    "take_blocks": lambda pool: pool.take_blocks(blocks(pool, 9, 4, 1)),
    "touch": lambda pool: pool.touch(blocks(pool, 1, 5, 7, 1, 0, 9)),
    "free_blocks": lambda pool: pool.free_blocks(blocks(pool, 8, 6, 10, 5, 0, 6, 11)),
    "unpin_blocks": lambda pool: pool.unpin_blocks(blocks(pool, 8, 5, 6), ignore_reuse),
    "cache_full_blocks": cache_three,
    "cache_full_blocks, a copy": cache_a_copy,
    "cache_full_blocks, promoted": promote,
    "cache_partial_block": add_secondary_key,
    "evict_blocks": evict_several_keys,
    "move_block_hashes": move_keys,
    "reset_prefix_cache": reset,
    "swap_block_ids": swap_ids,
    "add_blocks": lambda pool: pool.add_blocks(3),
    "remove_last_blocks": remove_two,
    "take_events": lambda pool: pool.take_events(),
}
POOLS = {
    "plain": (BlockPool, {}),
    "events": (BlockPool, {"enable_kv_cache_events": True}),
    "collector": (BlockPool, {"collector": True, "enable_kv_cache_events": True}),
    "no caching": (BlockPool, {"enable_caching": False}),
    "runs": (RunBlockPool, {"enable_kv_cache_events": True}),
    "runs, collector": (RunBlockPool, {"collector": True}),
}


def make(kind, watched=False, pools=POOLS):
    pool_class, options = pools[kind]
    options = dict(options)
    if options.pop("collector", False):
        options["metrics_collector"] = KVCacheMetricsCollector(1.0)
    pool = make_pool(PICTURE, pool_class, **options)
    if watched:
        pool.get_new_blocks(0)
        watcher = ReuseWatcher(ignore_reuse, 0.0)
        pool.reuse_watchers = {3: watcher, 2: watcher, 7: watcher}
    # One partial hash that can be promoted, a block with three keys, a key with two blocks.
    pool._insert_block_hash(hash_of(30) + GROUP, pool.blocks[11], 2)
    for number in (50, 51, 1):
        pool._insert_block_hash(hash_of(number) + GROUP, pool.blocks[8], 4)
    pool.take_events()
    if isinstance(pool, RunBlockPool):
        pool.rebuild_index()
    pool.keys_before = count_copies(pool)
    return pool


def count_copies(pool):
    entries = pool.cached_block_hash_to_block._cache
    return {key: len(found) if isinstance(found, dict) else 1 for key, found in entries.items()}


def check_pool(pool):
    """Check the invariants, and that the events so far turn the earlier map into the current one."""
    if isinstance(pool, RunBlockPool):
        run_invariants.check(pool)
    else:
        invariants.check(pool)
    if pool.enable_kv_cache_events:
        copies = dict(pool.keys_before)
        for event in pool.take_events():
            if isinstance(event, AllBlocksCleared):
                copies.clear()
                continue
            step = -1 if isinstance(event, BlockRemoved) else 1
            for external in event.block_hashes:
                key = next(key for key in known_keys() if external_of(key) == external)
                copies[key] = copies.get(key, 0) + step
        told = {key for key, count in copies.items() if count > 0}
        assert told == set(count_copies(pool)), "the events tell another map"


def known_keys():
    return [hash_of(number) + GROUP for number in range(60)]


def external_of(key):
    return int.from_bytes(key[:-4][-8:], "big")


def draw(pool, watched):
    """Draw the pool without stars, because some of the blocks to be taken may have been evicted.

    Watched blocks go to the front of the queue when their watchers are called; the order is ignored then.
    """
    free, *held = state(pool).replace("*", "").split(" | ")
    return (sorted(free.split()) if watched else free, *held)


@pytest.mark.parametrize("watched", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "watched"])
@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("name", CALLS)
def test_the_pool_is_sound_after_an_interrupt_at_any_moment(name, kind, watched):
    call = CALLS[name]
    reference = make(kind, watched)
    states = [draw(reference, watched)]
    call(reference)
    states.append(draw(reference, watched))
    if name in FREED_FIRST:
        between = make(kind, watched)
        between.free_blocks(blocks(between, *FREED_FIRST[name]))
        states.append(draw(between, watched))

    def check(pool):
        check_pool(pool)
        assert draw(pool, watched) in states

    tried, broken = interrupt_everywhere(lambda: make(kind, watched), call, check)
    assert not broken, f"{name}, {kind}, {watched}: {len(broken)} of {tried}: {broken[:3]}"


class WatchedBlockPool(BlockPool):
    """A pool that reports when a recovery begins."""

    on_recovery = None

    def _recover(self):
        if self.on_recovery is not None:
            self.on_recovery()
        super()._recover()


class WatchedRunBlockPool(RunBlockPool):
    on_recovery = None

    def _recover(self):
        if self.on_recovery is not None:
            self.on_recovery()
        super()._recover()


WATCHED = {
    "events": (WatchedBlockPool, {"enable_kv_cache_events": True}),
    "collector": (WatchedBlockPool, {"collector": True}),
    "runs": (WatchedRunBlockPool, {}),
}


@pytest.mark.parametrize("kind", WATCHED)
@pytest.mark.parametrize("name", CALLS)
def test_the_pool_is_sound_after_an_interrupted_undo(name, kind):
    def watch(pool, second):
        pool.on_recovery = second

    def complete(pool):
        pool.get_new_blocks(0)
        check_pool(pool)

    tried, broken = interrupt_twice(lambda: make(kind, pools=WATCHED), CALLS[name], complete, watch, step=7)
    assert not broken, f"{name}, {kind}: {len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("kind", POOLS)
def test_the_pool_is_sound_after_signals_at_random_times(kind):
    rng = random.Random(kind)
    pool = make(kind)
    pool.free_blocks(blocks(pool, 5, 6, 6, 8, 10, 10, 10, 11))
    num_cached = 0

    def step():
        nonlocal num_cached
        num_cached += 2
        taken = pool.get_new_blocks(rng.randint(2, 5))
        if pool.enable_caching:
            request = make_request([hash_of(num_cached), hash_of(num_cached + 1)])
            pool.cache_full_blocks(request, taken, 0, 2, 4, 0)
        pool.touch(taken)
        pool.free_blocks(taken)
        pool.free_blocks(taken)
        pool.take_events()

    with alarm_that_raises():
        for _ in range(150):
            run_until_interrupted(step, rng)
            if isinstance(pool, RunBlockPool):
                run_invariants.check(pool)
            else:
                invariants.check(pool)
            for block in pool.blocks[1:]:  # the references of the step
                pool.free_blocks([block] * block.ref_cnt)


def make_cached():
    """Return a pool whose free blocks are all cached."""
    pool = BlockPool(6, True, 4, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(5)
    for number, block in enumerate(blocks):
        pool._insert_block_hash(hash_of(number) + GROUP, block, 4)
    pool.free_blocks(blocks)
    return pool


def reset_and_check(pool):
    pool.free_blocks([block for block in pool.blocks[1:] if block.ref_cnt])
    assert pool.reset_prefix_cache()
    *before, last = pool.take_events()
    assert isinstance(last, AllBlocksCleared)
    assert all(isinstance(event, BlockRemoved) for event in before)


def test_removals_of_an_interrupted_call_precede_a_reset_event():
    tried, broken = interrupt_everywhere(make_cached, lambda pool: pool.get_new_blocks(4), reset_and_check)
    assert tried > 0 or COMPILED
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"
