"""The ages of blocks at their hits and evictions, in the pool and in a lower tier."""

import threading
import time

import pytest

from kv_pool import BlockAllocationRequest, GPUKVPool
from kv_pool.metrics.block_ages import BlockAges
from kv_pool.tiers import TieredCache
from kv_pool.tiers.tier import Tier


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def fill(pool, number, num_blocks):
    pool.allocate(BlockAllocationRequest(num_blocks=num_blocks, sequence_id=number))
    hashes = [bytes([number, one]) * 16 for one in range(num_blocks)]
    pool.cache_prefix(number, hashes)
    return hashes


def read(ages):
    return {name: (one.count, one.sum_s) for name, one in ages.get_histograms().items()}


def test_ages_are_times_since_the_last_use(clock):
    pool = GPUKVPool(10, 4)
    ages = BlockAges(lambda: pool.block_pool, num_keys=100, clock=clock, seed=0)
    hashes = fill(pool, 1, 4)
    for _ in range(3):
        ages.look()
    clock.now += 5
    ages.look()  # in use for 5 s
    pool.free_sequence(1)
    clock.now += 3
    ages.look()
    pool.claim_prefix(2, hashes[:3])
    ages.look()
    assert {name: (one.count, one.sum_s) for name, one in ages.get_histograms().items()} == {
        "hit GPU": (3, 9)
    }
    pool.free_sequence(2)
    clock.now += 20
    fill(pool, 3, 10)
    ages.look()
    assert read(ages)["evict GPU"] == (4, 3 * 20 + 23)
    assert read(ages)["life GPU"] == (4, 4 * 28)


def test_a_block_is_followed_into_a_lower_tier_and_back(clock):
    pool = GPUKVPool(10, 4)
    TieredCache(pool.block_pool, None, [Tier(10)])
    ages = BlockAges(lambda: pool.block_pool, num_keys=100, clock=clock, seed=0)
    first = fill(pool, 1, 2)
    for _ in range(5):
        ages.look()
    pool.free_sequence(1)
    clock.now += 10
    fill(pool, 2, 10)
    ages.look()
    assert read(ages) == {"evict GPU": (2, 20), "life GPU": (2, 20)}
    pool.free_sequence(2)
    clock.now += 7
    pool.allocate(BlockAllocationRequest(num_blocks=1, sequence_id=3))
    pool.cache_prefix(3, first[:1])  # as loaded from the tier
    ages.look()
    assert read(ages)["hit CPU"] == (1, 17)
    fill(pool, 4, 9)
    ages.look()
    assert read(ages)["evict CPU"] == (1, 17)  # the tier had room for all but the oldest


def test_the_thread_looks_until_it_is_stopped():
    pool = GPUKVPool(10, 4)
    deadline, number = time.monotonic() + 10, 0
    with BlockAges(lambda: pool.block_pool, period_s=0.001) as ages:
        while "evict GPU" not in read(ages) and time.monotonic() < deadline:
            number += 1
            fill(pool, number, 10)
            time.sleep(0.01)
            pool.free_sequence(number)
    assert read(ages)["evict GPU"][0] > 0
    assert not any(thread.name == "kv_pool block ages" for thread in threading.enumerate())
