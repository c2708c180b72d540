"""Cache policies in replays: LRU as a policy gives the reference counts; the others evict as they do live."""

import random
from dataclasses import replace
from itertools import islice

import pytest
from lab.made_trace import make_random_records, write_trace

from kv_pool import BlockPool, BlockRemoved, InvalidArgumentError, KVCacheManager
from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.core.policy_names import list_policies
from kv_pool.events.event_publisher import NullEventPublisher
from kv_pool.lab.event_feed import EventFeed
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.simulator import run_replay
from kv_pool.protocol import BlockAllocationRequest

LRU_AS_POLICY = "kv_pool.core.cache_policy:LRU"


class Removed(NullEventPublisher):
    """Keeps the hashes that are removed, in order."""

    def __init__(self):
        self.hashes = []

    def publish(self, events):
        for event in events:
            if isinstance(event, BlockRemoved):
                self.hashes += event.block_hashes


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    return str(write_trace(path, make_random_records(random.Random(2), 150, 8, partial_ids=False)))


def list_removed(settings):
    publisher = Removed()
    run_replay(settings, feed=EventFeed(publisher))
    return publisher.hashes


@pytest.mark.parametrize("clock", ["instant", "trace"])
def test_lru_as_a_policy_evicts_the_blocks_of_the_free_queue(trace, clock):
    settings = [ReplaySettings(trace, 40, clock=clock, policy=policy) for policy in ("lru", LRU_AS_POLICY)]
    removed = [list_removed(each) for each in settings]
    assert removed[0] == removed[1]
    assert len(removed[0]) > 100


def read_requests(trace, limit=None):
    opened = ReplaySettings(trace, 40, block_size=8).open_trace()
    return list(islice(opened.read_requests(), limit))


@pytest.mark.parametrize("policy", list_policies())
def test_a_policy_evicts_the_same_blocks_in_the_replay_and_live(trace, policy):
    seconds = 0.0
    requests = read_requests(trace)
    pool = BlockPool(41, True, 8, enable_kv_cache_events=True, clock=lambda: seconds, policy=policy)
    manager = KVCacheManager(pool)
    for request in requests:
        seconds = max(seconds, request.arrival_ms / 1000)
        prefix = manager.get_computed_blocks(request, request.max_hit_tokens)
        assert manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix) is not None
        request.num_computed_tokens = request.num_tokens
        manager.free(request)
    live = [event.block_hashes[0] for event in pool.take_events() if isinstance(event, BlockRemoved)]
    assert list_removed(ReplaySettings(trace, 40, policy=policy)) == live
    assert len(live) > 100


@pytest.mark.parametrize("policy", ["s3fifo", "slru", "flat:sieve"])
def test_a_policy_chooses_the_blocks_of_sequences_unless_a_run_is_required(trace, policy):
    pools = [GPUKVPool(40, 8, policy=policy, enable_kv_cache_events=True) for _ in range(2)]
    num_hits = 0
    for number, request in enumerate(read_requests(trace), 1):
        num_blocks = -(-request.num_tokens // 8)
        for pool, contiguous in zip(pools, ("prefer", "no"), strict=True):
            shared = pool.claim_prefix(number, request.block_hashes)
            if num_blocks > len(shared):
                pool.allocate(BlockAllocationRequest(num_blocks - len(shared), number, contiguous=contiguous))
            pool.cache_prefix(number, request.block_hashes)
            pool.free_sequence(number)
        num_hits += len(shared)
    assert num_hits > 20
    assert pool.block_pool.policy_host.failure is None
    assert pools[0].take_events() == pool.take_events()


def test_policies_that_cannot_run_are_refused(trace):
    with pytest.raises(
        InvalidArgumentError, match=r"no cache policy 'mru': did you mean 'lru'\? known are lru"
    ):
        run_replay(ReplaySettings(trace, 40, policy="mru"))


def test_kept_prefixes_are_hit_with_any_policy(trace):
    settings = ReplaySettings(trace, 10, policy="fifo")
    kept = run_replay(replace(settings, keep_prefix_tokens=8))
    assert kept.tokens_hit > run_replay(settings).tokens_hit
