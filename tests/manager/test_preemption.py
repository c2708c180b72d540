from types import SimpleNamespace

import pytest

from kv_pool import BlockHasher, BlockPool, InvalidArgumentError, KVCacheManager, Request
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec
from kv_pool.manager.preemption import (
    PreemptionCost,
    PreemptionKind,
    PreemptionLoss,
    count_loss,
    find_victim,
)

HASHER = BlockHasher("sha256", "s", 4)


def start(manager, name, tokens):
    request = Request(name, tokens, HASHER)
    prefix = manager.get_computed_blocks(request)
    manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
    request.num_computed_tokens = request.num_tokens
    return request


def test_the_last_admitted_of_lowest_priority_is_preempted():
    priorities = {"a": 1, "b": 0, "c": 1, "d": 0}
    running = [SimpleNamespace(name=name, priority=priority) for name, priority in priorities.items()]
    order = []
    while running:
        victim = find_victim(running, lambda request: request.priority)
        running.remove(victim)
        order.append(victim.name)
    assert order == ["d", "b", "c", "a"]


def test_without_priorities_the_last_admitted_is_preempted():
    assert find_victim(["first", "second"]) == "second"
    with pytest.raises(InvalidArgumentError, match="no request is running"):
        find_victim([])


def test_a_loss_distinguishes_shared_and_cached_tokens():
    manager = KVCacheManager(BlockPool(20, True, 4))
    start(manager, "other", range(9))
    request = start(manager, "one", [*range(8), *range(50, 60)])
    assert count_loss(manager, request) == PreemptionLoss(
        num_computed_tokens=18, num_kept_tokens=8, num_cached_tokens=16, num_blocks=5
    )
    manager.free(request)
    with pytest.raises(InvalidArgumentError, match="has no blocks"):
        count_loss(manager, request)


def test_a_loss_counts_the_shortest_prefix_and_all_blocks():
    groups = [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=5)]
    manager = KVCacheManager(BlockPool(40, True, 4), groups=groups)
    start(manager, "other", range(13))
    request = start(manager, "one", [*range(12), *range(50, 58)])
    request.append_output_token_ids([1, 2])
    manager.allocate_slots(request, 2)  # blocks that left the window are released
    request.num_computed_tokens += 2
    assert manager.get_block_ids("one", 1)[:4] == [0, 0, 0, 0]
    loss = count_loss(manager, request)
    assert loss == PreemptionLoss(22, num_kept_tokens=12, num_cached_tokens=20, num_blocks=6 + 2)


def test_the_cheaper_preemption_is_chosen():
    rule = PreemptionCost(prefill_tokens_per_s=1000, copy_bytes_per_s=1000, block_bytes=1)
    assert rule(PreemptionLoss(101, 0, 0, num_blocks=50)) is PreemptionKind.SWAP  # 101 ms, 100 ms
    assert rule(PreemptionLoss(100, 0, 0, num_blocks=50)) is PreemptionKind.RECOMPUTE
    assert rule(PreemptionLoss(101, 1, 101, num_blocks=50)) is PreemptionKind.RECOMPUTE
    with pytest.raises(InvalidArgumentError, match="block_bytes is 0; it must be above 0"):
        PreemptionCost(prefill_tokens_per_s=1000, copy_bytes_per_s=1000, block_bytes=0)
