"""The notes on vLLM v1's BlockPool: blocks, free queue, hash map, null block, taking, freeing, metrics.

In the notes' order, with their numbers. They describe vLLM of February 2026; the pool follows vLLM 0.33, and
the tests name the differences.
"""

import pytest
from drawing import hash_of, ids, state

from kv_pool import (
    AllBlocksCleared,
    BlockHasher,
    BlockHashToBlockMap,
    BlockPool,
    BlockRemoved,
    BlockStored,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    KVCacheManager,
    KVCacheMetricsCollector,
    Request,
)
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.metrics.residency import BlockMetricsState

BLOCK_SIZE = 4
HASHER = BlockHasher("sha256", "s", BLOCK_SIZE)


def make_pool(num_gpu_blocks=8, **options):
    return BlockPool(num_gpu_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE, **options)


def key_of(number):
    return make_block_hash_with_group_id(hash_of(number), 0)


def take_cached(pool, request, num_blocks):
    """Allocate and cache blocks for the request's first full blocks."""
    taken = pool.get_new_blocks(num_blocks)
    pool.cache_full_blocks(request, taken, 0, num_blocks, BLOCK_SIZE, 0)
    return taken


# ---- KVCacheBlock --------------------------------------------------------------------------------


def test_a_new_block_is_free_without_hash_or_links():
    block = KVCacheBlock(5)
    assert (block.block_id, block.ref_cnt, block.is_null) == (5, 0, False)
    assert (block.block_hash, block._block_hash) == (None, None)
    assert (block.prev_free_block, block.next_free_block) == (None, None)


def test_a_hash_is_set_once_reset_and_set_again():
    """The notes assign to `block_hash`. In vLLM 0.33, and here, it is read-only: `set_block_hash` sets it."""
    block = KVCacheBlock(5)
    block.set_block_hash(key_of(1))
    assert block.block_hash == key_of(1)
    with pytest.raises(AssertionError, match="block 5 already carries a hash"):
        block.set_block_hash(key_of(2))
    with pytest.raises(AttributeError):
        block.block_hash = key_of(2)
    assert block.block_hash == key_of(1)
    block.reset_hash()
    assert block.block_hash is None
    block.set_block_hash(key_of(2))
    assert block.block_hash == key_of(2)


def test_the_six_stages_of_a_block():
    pool = make_pool(2)
    request = Request("r", range(4), HASHER)
    block = pool.blocks[1]
    assert block.ref_cnt == 0
    assert pool.get_new_blocks(1) == [block]
    assert block.ref_cnt == 1
    pool.cache_full_blocks(request, [block], 0, 1, BLOCK_SIZE, 0)
    assert block.block_hash is not None
    pool.touch([block])
    assert block.ref_cnt == 2
    pool.free_blocks([block])
    pool.free_blocks([block])
    assert (block.ref_cnt, pool.get_num_free_blocks()) == (0, 1)
    assert block.block_hash is not None
    assert pool.get_new_blocks(1) == [block]
    assert (block.ref_cnt, block.block_hash) == (1, None)


# ---- FreeKVCacheBlockQueue -----------------------------------------------------------------------


def test_the_queue_is_bounded_by_two_sentinels():
    blocks = [KVCacheBlock(number) for number in range(3)]
    queue = FreeKVCacheBlockQueue(blocks)
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    assert (head.block_id, tail.block_id) == (-1, -1)
    assert head.next_free_block is blocks[0]
    assert tail.prev_free_block is blocks[2]
    assert blocks[0].next_free_block is blocks[1]
    assert blocks[1].prev_free_block is blocks[0]


def test_the_queue_pops_removes_and_appends():
    blocks = [KVCacheBlock(number) for number in range(6)]
    queue = FreeKVCacheBlockQueue(blocks)
    assert ids(queue.get_all_free_blocks()) == [0, 1, 2, 3, 4, 5]
    assert queue.popleft() is blocks[0]
    assert queue.popleft_n(2) == blocks[1:3]
    queue.remove(blocks[4])
    assert ids(queue.get_all_free_blocks()) == [3, 5]
    queue.append(blocks[4])
    queue.append_n([blocks[2], blocks[0]])
    assert ids(queue.get_all_free_blocks()) == [3, 5, 4, 2, 0]
    assert queue.num_free_blocks == 5


# ---- BlockHashToBlockMap -------------------------------------------------------------------------


def test_the_map_stores_one_block_or_a_dict_of_blocks():
    block_map = BlockHashToBlockMap()
    first, second = KVCacheBlock(1), KVCacheBlock(2)
    assert block_map.get_one_block(key_of(1)) is None
    block_map.insert(key_of(1), first)
    assert block_map._cache == {key_of(1): first}
    block_map.insert(key_of(1), second)
    assert block_map._cache == {key_of(1): {1: first, 2: second}}
    assert block_map.get_one_block(key_of(1)) is first
    assert len(block_map) == 1  # keys, not blocks
    assert block_map.pop(key_of(1), 1) is first
    assert block_map.get_one_block(key_of(1)) is second
    assert block_map.pop(key_of(1), 7) is None
    assert block_map.pop(key_of(1), 2) is second
    assert len(block_map) == 0


def test_equal_blocks_of_two_requests_both_stay():
    pool = make_pool()
    request, twin = Request("r", range(4), HASHER), Request("t", range(4), HASHER)
    [block] = take_cached(pool, request, 1)
    [copy] = take_cached(pool, twin, 1)
    assert (block.block_id, copy.block_id) == (1, 2)
    assert block.block_hash == copy.block_hash
    assert pool.get_cached_block(request.block_hashes[0], [0]) == [block]


# ---- null_block ----------------------------------------------------------------------------------


def test_the_null_block_is_never_taken_freed_or_cached():
    pool = make_pool()
    assert pool.null_block is pool.blocks[0]
    assert (pool.null_block.block_id, pool.null_block.is_null) == (0, True)
    assert pool.null_block not in pool.get_new_blocks(7)
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block])
    assert pool.get_num_free_blocks() == 0
    request = Request("r", range(8), HASHER)
    blocks = [pool.null_block, pool.blocks[1]]
    pool.cache_full_blocks(request, blocks, 0, 2, BLOCK_SIZE, 0)
    assert (pool.null_block.block_hash, pool.blocks[1].block_hash is None) == (None, False)


# ---- taking --------------------------------------------------------------------------------------


def test_taking_from_the_front_evicts_without_lookup():
    pool = make_pool(4)
    request = Request("r", range(12), HASHER)
    taken = take_cached(pool, request, 3)
    pool.free_blocks(reversed(taken))
    assert state(pool) == "free: 3* 2* 1*"
    assert ids(pool.get_new_blocks(1)) == [3]
    assert pool.get_cached_block(request.block_hashes[2], [0]) is None
    assert pool.get_cached_block(request.block_hashes[0], [0]) == [pool.blocks[1]]
    with pytest.raises(ValueError, match="asked for 3 blocks, 2 are free"):
        pool.get_new_blocks(3)
    assert state(pool) == "free: 2* 1* | in use: 3"


def test_a_block_is_hit_in_all_groups_or_none():
    pool = make_pool()
    request = Request("r", range(4), HASHER)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks[:1], 0, 1, BLOCK_SIZE, 0)
    assert pool.get_cached_block(request.block_hashes[0], [0]) == blocks[:1]
    assert pool.get_cached_block(request.block_hashes[0], [0, 1]) is None
    pool.cache_full_blocks(request, blocks[1:], 0, 1, BLOCK_SIZE, 1)
    assert pool.get_cached_block(request.block_hashes[0], [0, 1]) == blocks


# ---- freeing -------------------------------------------------------------------------------------


def test_a_request_frees_its_tail_before_its_head():
    pool = make_pool()
    manager = KVCacheManager(pool, BLOCK_SIZE)
    request = Request("r", range(12), HASHER)
    manager.allocate_slots(request, 12)
    manager.free(request)
    # Cached blocks go to the end of the queue, the tail first.
    assert state(pool) == "free: 4 5 6 7 3* 2* 1*"


def test_freed_blocks_without_a_hash_go_to_the_front():
    """In the notes all freed blocks go to the end. vLLM 0.33 puts those without a hash in front: they
    cannot be hit, and each one reused before a cached block saves a hit.
    """
    pool = make_pool()
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(Request("r", range(4), HASHER), blocks[:1], 0, 1, BLOCK_SIZE, 0)
    pool.free_blocks(blocks)
    assert state(pool) == "free: 2 3 4 5 6 7 1*"


def test_only_a_block_without_references_becomes_free():
    pool = make_pool(3)
    [block] = pool.get_new_blocks(1)
    pool.touch([block])
    pool.free_blocks([block])
    assert (block.ref_cnt, pool.get_num_free_blocks()) == (1, 1)
    pool.free_blocks(iter([block]))
    assert (block.ref_cnt, pool.get_num_free_blocks()) == (0, 2)


def test_a_touched_block_leaves_the_middle_of_the_queue():
    pool = make_pool(5)
    taken = take_cached(pool, Request("r", range(16), HASHER), 4)
    pool.free_blocks(reversed(taken))
    pool.touch([pool.blocks[2]])
    assert state(pool) == "free: 4* 3* 1* | in use: 2*"


# ---- eviction ------------------------------------------------------------------------------------


def test_evicting_returns_whether_there_was_a_hash():
    pool = make_pool(enable_kv_cache_events=True)
    request = Request("r", range(4), HASHER)
    [block] = take_cached(pool, request, 1)
    pool.take_events()
    assert pool._maybe_evict_cached_block(block) is True
    assert block.block_hash is None
    assert pool.get_cached_block(request.block_hashes[0], [0]) is None
    assert [type(event) for event in pool.take_events()] == [BlockRemoved]
    assert pool._maybe_evict_cached_block(block) is False


def test_evicted_blocks_keep_their_place_in_the_queue():
    pool = make_pool(4)
    taken = take_cached(pool, Request("r", range(12), HASHER), 3)
    pool.free_blocks(reversed(taken))
    pool.evict_blocks({2})
    assert state(pool) == "free: 3* 2 1*"


def test_the_cache_is_reset_only_while_nothing_is_in_use():
    pool = make_pool(4, enable_kv_cache_events=True)
    taken = take_cached(pool, Request("r", range(12), HASHER), 3)
    assert pool.reset_prefix_cache() is False
    assert len(pool.cached_block_hash_to_block) == 3
    pool.free_blocks(reversed(taken))
    pool.take_events()
    assert pool.reset_prefix_cache() is True
    assert len(pool.cached_block_hash_to_block) == 0
    assert {block.block_hash for block in pool.blocks} == {None}
    assert pool.take_events() == [AllBlocksCleared()]


# ---- events, usage -------------------------------------------------------------------------------


def test_take_events_replaces_the_list():
    pool = make_pool(2, enable_kv_cache_events=True)
    request = Request("r", range(4), HASHER)
    taken = take_cached(pool, request, 1)
    queue = pool.kv_event_queue
    assert pool.take_events() is queue
    assert pool.kv_event_queue == []
    assert [type(event) for event in queue] == [BlockStored]
    pool.free_blocks(taken)
    pool.get_new_blocks(1)
    assert [type(event) for event in pool.take_events()] == [BlockRemoved]
    assert make_pool(2).take_events() == []


def test_usage_excludes_the_null_block():
    pool = make_pool(11)
    assert pool.get_usage() == 0.0
    pool.get_new_blocks(3)
    assert pool.get_usage() == pytest.approx(0.3)
    pool.get_new_blocks(7)
    assert pool.get_usage() == 1.0


# ---- metrics -------------------------------------------------------------------------------------


def test_one_block_in_a_hundred_is_sampled_by_default():
    assert KVCacheMetricsCollector().sample_rate == 0.01
    collector = KVCacheMetricsCollector(1.0)
    assert all(collector.should_sample_block() for _ in range(100))


def test_a_sampled_block_reports_its_times():
    now_ns = [0]
    collector = KVCacheMetricsCollector(1.0, clock_ns=lambda: now_ns[0])
    pool = make_pool(2, metrics_collector=collector)
    [block] = take_cached(pool, Request("r", range(4), HASHER), 1)
    metrics = collector.block_metrics[block.block_id]
    assert isinstance(metrics, BlockMetricsState)
    assert (metrics.birth_time_ns, metrics.last_access_ns, metrics.access_history.maxlen) == (0, 0, 4)
    for seconds in (1, 3, 6, 10, 15):
        now_ns[0] = seconds * 10**9
        pool.touch([block])
    assert list(metrics.access_history) == [3 * 10**9, 6 * 10**9, 10 * 10**9, 15 * 10**9]
    for _ in range(6):
        pool.free_blocks([block])
    now_ns[0] = 20 * 10**9
    pool.get_new_blocks(1)
    [sample] = collector.drain_events()
    assert (sample.lifetime_seconds, sample.idle_seconds) == (20.0, 5.0)
    assert sample.reuse_gaps_seconds == (3.0, 4.0, 5.0)
    assert collector.drain_events() == []


# ---- construction --------------------------------------------------------------------------------


def test_the_hash_block_size_may_divide_a_groups_block_size():
    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=BLOCK_SIZE)
    request = Request("r", range(16), HASHER)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 2, 2 * BLOCK_SIZE, 0)
    assert [pool.get_cached_block(request.block_hashes[at], [0]) for at in range(4)] == [
        None,
        blocks[:1],
        None,
        blocks[1:],
    ]


@pytest.mark.parametrize("enable_caching", [True, False])
def test_a_pool_without_caching_takes_and_frees_alike(enable_caching):
    pool = BlockPool(4, enable_caching, BLOCK_SIZE)
    blocks = pool.get_new_blocks(2)
    assert [block.ref_cnt for block in blocks] == [1, 1]
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 3
