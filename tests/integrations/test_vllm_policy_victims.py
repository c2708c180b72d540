"""The same requests evict the same blocks live and under vLLM's scheduler (marker `vllm`).

`tests/lab/test_policies.py` compares the replay with the live pool.
"""

import random

import pytest
from lab.made_trace import make_random_records, write_trace

from kv_pool import BlockPool, KVCacheManager
from kv_pool.core.policy_names import list_policies
from kv_pool.lab.settings import ReplaySettings

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_warnings")]

NUM_BLOCKS = 40
BLOCK_SIZE = 8
POLICIES = ["lru", *list_policies(), "flat:sieve", "flat:arc"]


class Victims:
    """After each request: the ids of the free blocks in order, and the content of each block."""

    def __init__(self):
        self.pictures = []
        self.num_evictions = 0

    def note(self, pool):
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        self.pictures.append((free, [block.block_hash for block in pool.blocks]))
        self.num_evictions = pool.num_evictions


def watch_live(settings, requests):
    victims, now = Victims(), Now()
    pool = BlockPool(NUM_BLOCKS + 1, True, BLOCK_SIZE, clock=now.read, policy=settings.policy)
    manager = KVCacheManager(pool)
    for request in requests:
        now.move(request)
        prefix = manager.get_computed_blocks(request, request.max_hit_tokens)
        assert manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix) is not None
        request.num_computed_tokens = request.num_tokens
        manager.free(request)
        victims.note(pool)
    return victims


def watch_scheduler(settings, requests, level, folder):
    from integrations.made_scheduler import make_answer, make_config, make_request, make_scheduler
    from integrations.scheduler_side import LEVELS, rebound
    from manager.vllm_manager import make_spec
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    victims, now = Victims(), Now()
    config = make_config(
        folder,
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": NUM_BLOCKS * BLOCK_SIZE},
        cache={"block_size": BLOCK_SIZE, "enable_prefix_caching": True},
    )
    group = KVCacheGroupSpec(["layer"], make_spec({"kind": "full", "block_size": BLOCK_SIZE}))
    with rebound(LEVELS[level]()):
        scheduler = make_scheduler(config, [group], num_blocks=NUM_BLOCKS + 1, block_size=BLOCK_SIZE)
    pool = scheduler.kv_cache_manager.block_pool
    pool.policy_host.policy.clock = now.read
    for request in requests:
        now.move(request)
        sampling = {"max_tokens": 1, "ignore_eos": True}
        made = make_request(request.request_id, request.all_token_ids, hash_as(request), sampling)
        scheduler.add_request(made)
        output = scheduler.schedule()
        assert output.num_scheduled_tokens
        scheduler.update_from_output(output, make_answer({request.request_id: [2]}))
        assert made.is_finished()
        victims.note(pool)
    return victims


def hash_as(request):
    """Return a block hasher that gives a request of vLLM the hashes of this request of the trace."""
    return lambda made: request.block_hashes[len(made.block_hashes) :]


class Now:
    """The time of the requests' arrivals, in seconds."""

    def __init__(self):
        self.seconds = 0.0

    def move(self, request):
        self.seconds = max(self.seconds, request.arrival_ms / 1000)

    def read(self):
        return self.seconds


@pytest.mark.parametrize("level", ["pool", "manager"])
@pytest.mark.parametrize("policy", POLICIES)
def test_victims_are_the_same_live_and_in_vllm(policy, level, tmp_path, monkeypatch):
    records = make_random_records(random.Random(2), 150, BLOCK_SIZE, partial_ids=False)
    path = write_trace(tmp_path / "trace.jsonl", [record | {"output_length": 0} for record in records])
    settings = ReplaySettings(str(path), NUM_BLOCKS, block_size=BLOCK_SIZE, policy=policy)
    requests = list(settings.open_trace().read_requests())
    monkeypatch.setenv("KV_POOL_VLLM_POLICY", "kv_pool.core.cache_policy:LRU" if policy == "lru" else policy)
    scheduled = watch_scheduler(settings, requests, level, tmp_path)
    live = watch_live(settings, requests)
    assert live.num_evictions > 100
    for expected, found in zip(live.pictures, scheduled.pictures, strict=True):
        assert found == expected
