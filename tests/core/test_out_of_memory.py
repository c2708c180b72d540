"""Memory runs out in the middle of a call: the pool is whole, or refuses the next call until a repair."""

import random

import pytest
from drawing import hash_of, make_request

from kv_pool import BlockPool, PoolInterruptedError
from kv_pool.contiguous import invariants as run_invariants
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants

testcapi = pytest.importorskip("_testcapi", reason="CPython was built without its test modules")
NUM_BLOCKS = 24


class Life:
    """Random calls on one pool; `held` are the blocks returned by calls that did not raise."""

    def __init__(self, pool, seed):
        self.pool = pool
        self.draw = random.Random(seed)
        self.held = []
        self.next_hash = 0

    def prepare(self):
        """Return the next call with its arguments already made, so that only the call itself allocates."""
        pool, draw = self.pool, self.draw
        name = draw.choice(["take", "take", "free", "touch", "cache", "evict", "take_events"])
        if name == "take":
            count = draw.randint(1, 6)
            if count > pool.get_num_free_blocks():
                return name, lambda: None
            return name, lambda: self.held.append(pool.get_new_blocks(count))
        if name == "take_events" or not self.held:
            return "take_events", pool.take_events
        blocks = draw.choice(self.held)
        if name == "free":
            return name, lambda: pool.free_blocks(blocks)
        if name == "touch":
            return name, lambda: pool.touch(blocks)
        if name == "evict":
            ids = [block.block_id for block in blocks]
            return name, lambda: pool.evict_blocks(ids)
        bare = [block for block in blocks if block.block_hash is None]
        request = make_request([hash_of(self.next_hash + at) for at in range(len(bare))])
        self.next_hash += len(bare)
        return name, lambda: pool.cache_full_blocks(request, bare, 0, len(bare), 4, 0)


def check(pool):
    (run_invariants if isinstance(pool, RunBlockPool) else invariants).check(pool)


def run_until(life, num_calls):
    for _ in range(num_calls):
        name, call = life.prepare()
        call()
        if name == "free":
            life.held = [blocks for blocks in life.held if blocks[0].ref_cnt]


@pytest.mark.parametrize("pool_class", [BlockPool, RunBlockPool])
@pytest.mark.parametrize("seed", range(4))
def test_the_pool_is_sound_after_a_memory_error_anywhere(seed, pool_class):
    num_tried = num_interrupted = 0
    broken = []
    for num_calls in range(3, 30, 3):
        for nth in range(60):
            life = Life(pool_class(NUM_BLOCKS, True, 4, enable_kv_cache_events=True), seed)
            run_until(life, num_calls)
            name, call = life.prepare()
            failed = False
            testcapi.set_nomemory(nth, nth + 1)
            try:
                call()
            except MemoryError:
                failed = True
            finally:
                testcapi.remove_mem_hooks()
            if not failed and nth > 20:
                break
            num_tried += 1
            try:
                if life.pool.is_changing:
                    num_interrupted += 1
                    with pytest.raises(PoolInterruptedError):
                        life.pool.get_new_blocks(1)
                    life.pool.repair([block for blocks in life.held for block in blocks])
                check(life.pool)
            except Exception as error:
                broken.append((num_calls, nth, name, error))
    assert num_tried > 100
    assert num_interrupted > 0
    assert not broken, f"{len(broken)} of {num_tried}: {broken[:3]}"
