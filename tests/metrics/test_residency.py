import random
from itertools import pairwise

import pytest

from kv_pool import BlockPool, InvalidArgumentError, KVCacheBlock, KVCacheMetricsCollector
from kv_pool.metrics.residency import KVCacheEvictionEvent


class Clock:
    now_ns = 1_000

    def __call__(self):
        return self.now_ns

    def advance(self, seconds):
        self.now_ns += int(seconds * 1e9)


@pytest.fixture
def clock():
    return Clock()


def test_the_sample_rate_is_the_share_of_sampled_blocks():
    random.seed(0)
    collector = KVCacheMetricsCollector(0.25)
    for block_id in range(4000):
        collector.on_block_allocated(KVCacheBlock(block_id))
    assert 900 < len(collector.block_metrics) < 1100


@pytest.mark.parametrize("rate", [0, -0.1, 1.1])
def test_an_invalid_sample_rate_is_refused(rate):
    with pytest.raises(InvalidArgumentError, match=f"sample_rate is {rate}"):
        KVCacheMetricsCollector(rate)
    with pytest.raises(AssertionError):
        KVCacheMetricsCollector(rate)


def test_a_reset_drops_undrained_samples_too(clock):
    collector = KVCacheMetricsCollector(1.0, clock_ns=clock)
    collector.on_block_allocated(KVCacheBlock(1))
    collector.on_block_evicted(KVCacheBlock(1))
    collector.on_block_allocated(KVCacheBlock(2))
    collector.reset()
    assert collector.block_metrics == {}
    assert collector.drain_events() == []


def test_a_pool_notifies_its_collector_of_every_lifetime(clock):
    collector = KVCacheMetricsCollector(1.0, clock_ns=clock)
    pool = BlockPool(2, True, 4, metrics_collector=collector)
    (block,) = pool.get_new_blocks(1)
    clock.advance(1)
    pool.touch([block])
    clock.advance(2)
    pool.touch([block])
    pool.free_blocks([block] * 3)
    clock.advance(3)
    pool.get_new_blocks(1)
    assert collector.drain_events() == [KVCacheEvictionEvent(6.0, 3.0, (2.0,))]
    assert list(collector.block_metrics) == [1]


@pytest.mark.parametrize("seed", range(10))
def test_random_lifetimes_agree_with_a_slow_model(clock, seed):
    """The model records every access time. Sampling is random in the collector itself."""
    rng = random.Random(seed)
    collector = KVCacheMetricsCollector(0.6, clock_ns=clock)
    stays, expected = {}, []
    for _ in range(300):
        clock.advance(rng.randrange(5))
        block = KVCacheBlock(rng.randrange(6))
        call = rng.choice(["allocated", "accessed", "accessed", "evicted"])
        getattr(collector, f"on_block_{call}")(block)
        if call == "allocated":
            if collector.block_metrics.get(block.block_id) is not stays.get(block.block_id, (None,))[0]:
                stays[block.block_id] = (collector.block_metrics[block.block_id], clock.now_ns, [])
        elif block.block_id in stays:
            _, born, accesses = stays[block.block_id]
            if call == "accessed":
                accesses.append(clock.now_ns)
            else:
                last = accesses[-4:]
                gaps = tuple((late - early) / 1e9 for early, late in pairwise(last))
                idle = clock.now_ns - (accesses[-1] if accesses else born)
                expected.append(KVCacheEvictionEvent((clock.now_ns - born) / 1e9, idle / 1e9, gaps))
                del stays[block.block_id]
        assert set(collector.block_metrics) == set(stays)
    assert expected
    assert collector.drain_events() == expected


def test_an_engine_can_supply_its_own_sample_class(clock):
    collector = KVCacheMetricsCollector(1.0, sample_type=lambda *values: ("mine", *values), clock_ns=clock)
    pool = BlockPool(2, True, 4, metrics_collector=collector)
    pool.free_blocks(pool.get_new_blocks(1))
    clock.advance(3)
    pool.get_new_blocks(1)
    assert collector.drain_events() == [("mine", 3.0, 3.0, ())]


def test_blocks_are_tracked_across_an_id_swap():
    collector = KVCacheMetricsCollector(1.0)
    for block_id in (1, 2, 3):
        collector.on_block_allocated(KVCacheBlock(block_id))
    first, second, third = (collector.block_metrics[block_id] for block_id in (1, 2, 3))
    collector.on_ids_swapped([(1, 2), (3, 4)])
    assert collector.block_metrics == {1: second, 2: first, 4: third}
