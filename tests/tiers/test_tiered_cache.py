"""Tests of `TieredCache`: events, tiers without bytes, pool operations, and its invariant checks."""

import numpy as np
import pytest
from made_threads import no_new_threads
from tiers.made_tiers import failing_writes
from tiers.tier_engine import TierEngine

from kv_pool import (
    BlockHasher,
    BlockPool,
    BlockRemoved,
    BlockStored,
    InvalidArgumentError,
    KVCacheManager,
    Request,
)
from kv_pool.contiguous.compaction import pack
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import make_block_hash_with_group_id, make_external_block_hash
from kv_pool.errors import TierError
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.manager.retention.directive import RetentionDirective
from kv_pool.storage import BlockStorage
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import make_host_buffer
from kv_pool.tiers import invariants
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.host_tier import HostTier, view_rows
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tiered_cache import TieredCache

HASHER = BlockHasher("sha256", "s", 4)


def make_cache(num_blocks, *capacities, **options):
    pool = BlockPool(num_blocks + 1, True, 4, True)
    media = ["CPU", "STORAGE"]
    tiers = [Tier(capacity, media[level]) for level, capacity in enumerate(capacities)]
    return TieredCache(pool, None, tiers, enable_events=True, **options)


def cache_request(cache, name, tokens, **options):
    """Return a request whose full blocks are cached and free."""
    request = Request(name, tokens, HASHER, **options)
    num_blocks = len(request.block_hashes)
    blocks = cache.block_pool.get_new_blocks(num_blocks)
    cache.block_pool.cache_full_blocks(request, blocks, 0, num_blocks, 4, 0)
    cache.block_pool.free_blocks(reversed(blocks))
    return request


def names_of(request):
    return [make_external_block_hash(block_hash) for block_hash in request.block_hashes]


def test_offload_events_have_tokens_and_precede_removals():
    cache = make_cache(3, 9)
    request = cache_request(cache, "a", range(100, 112), cache_salt="tenant", session_id="s1")
    names = names_of(request)
    cache.block_pool.take_events()
    cache.block_pool.get_new_blocks(3)
    stored, *removed = cache.block_pool.take_events()
    assert stored == BlockStored(
        names,
        None,
        list(range(100, 112)),
        4,
        None,
        "CPU",
        None,
        extra_keys=[("tenant",), None, None],
        group_idx=0,
        session_id="s1",
    )
    assert removed == [BlockRemoved([name], "GPU", 0) for name in reversed(names)]


def test_event_of_a_middle_block_names_its_parent():
    cache = make_cache(3, 9)
    request = cache_request(cache, "a", range(100, 112))
    cache.block_pool.take_events()
    middle = cache.block_pool.get_cached_block(request.block_hashes[1], [0])
    cache.block_pool.take_blocks(middle)
    stored, removed = cache.block_pool.take_events()
    first, name, _ = names_of(request)
    assert (stored.block_hashes, stored.parent_block_hash) == ([name], first)
    assert (stored.token_ids, stored.medium) == ([104, 105, 106, 107], "CPU")
    assert removed == BlockRemoved([name], "GPU", 0)


def test_move_to_the_next_tier_stores_before_it_removes():
    cache = make_cache(2, 1, 1)
    a, b = (cache_request(cache, name, [number] * 4) for number, name in enumerate("ab"))
    cache.block_pool.take_events()
    cache.block_pool.get_new_blocks(2)
    told = [
        (type(event).__name__, event.medium, event.block_hashes) for event in cache.block_pool.take_events()
    ]
    assert told == [
        ("BlockStored", "CPU", names_of(a)),
        ("BlockStored", "STORAGE", names_of(a)),
        ("BlockRemoved", "CPU", names_of(a)),
        ("BlockStored", "CPU", names_of(b)),
        ("BlockRemoved", "GPU", names_of(a)),
        ("BlockRemoved", "GPU", names_of(b)),
    ]


def test_blocks_of_a_reopened_folder_are_published_by_hash(tmp_path):
    engine = TierEngine(tmp_path, num_blocks=4, num_host_blocks=1, events=True)
    for number in range(3):
        engine.compute(request := engine.make_request(f"r{number}", [number] * 9))
        engine.manager.free(request)
    on_disk = engine.cache.tiers[1].list_keys()
    engine.restart_tiers()
    engine.manager.take_events()
    engine.cache.close()
    engine.manager.take_events()
    engine.open()
    told = engine.manager.take_events()
    assert len(told) == len(on_disk) > 0
    for event in told:
        assert (event.token_ids, event.block_size, event.parent_block_hash) == ([], 0, None)
        assert (event.medium, event.kv_cache_spec_kind) == ("STORAGE", "full_attention")


def test_event_data_of_lost_blocks_is_dropped():
    cache = make_cache(4, 3)
    for number in range(40):
        cache_request(cache, f"r{number}", [number] * 8)
    assert len(cache._events.labels) <= 2 * (5 + 3) + 2


def test_tier_events_need_those_of_the_pool():
    with pytest.raises(InvalidArgumentError, match="enable_kv_cache_events is off"):
        TieredCache(BlockPool(4, True, 4), None, [Tier(4)], enable_events=True)


@pytest.mark.parametrize("max_blocks", [0, 5])
def test_prefetch_without_bytes_is_immediate(max_blocks):
    """It moved a block although the limit of 0 turns it off."""
    cache = make_cache(1, 2, 9, max_prefetch_blocks=max_blocks)
    for number in range(4):
        cache_request(cache, f"r{number}", [number] * 4)
    key = cache.tiers[1].list_keys()[0]
    assert cache.find_tier(key) == 1
    assert cache.prefetch("r", [key]) == (1 if max_blocks else 0)
    assert cache.find_tier(key) == (0 if max_blocks else 1)
    cache.cancel_prefetch("r")
    assert cache.wait_for_prefetch()


def make_disk_cache(folder):
    """Return a host tier above a disk tier that has the block of this key; the pool has it, too."""
    pool = BlockPool(4, True, 4, True)
    storage = BlockStorage.wrap_state([np.zeros((4, 16), np.uint8)])
    disk = DiskTier(folder, 9, BlockLayout.describe(storage, 4, HASHER))
    cache = TieredCache(pool, storage, [HostTier(3, storage), disk], enable_events=True)
    request = cache_request(cache, "a", range(4))
    key = make_block_hash_with_group_id(request.block_hashes[0], 0)
    disk.put([key], storage, [pool.get_cached_block(request.block_hashes[0], [0])[0].block_id])
    pool.take_events()
    return cache, disk, key


def test_flush_raises_if_wrong_content_is_not_wiped(tmp_path):
    cache, disk, key = make_disk_cache(tmp_path)
    manager = KVCacheManager(cache.block_pool)
    block = cache.block_pool.get_cached_block(key[:-4], [0])[0]
    with failing_writes(disk):
        manager.evict_blocks([block.block_id])
        assert cache.find_tier(key) is None
        with pytest.raises(TierError, match="may be found after a restart"):
            cache.flush()
        cache.flush()
    told = [event for event in manager.take_events() if isinstance(event, BlockRemoved)]
    assert [event.medium for event in told] == ["STORAGE", "GPU"]
    invariants.check_cache(cache)
    cache.close()


def test_flush_raises_if_a_reset_fails_on_disk(tmp_path):
    cache, disk, key = make_disk_cache(tmp_path)
    with failing_writes(disk):
        assert KVCacheManager(cache.block_pool).reset_prefix_cache()
        assert cache.find_tier(key) is None
        with pytest.raises(TierError, match="may be found after a restart"):
            cache.flush()
    cache.close()


def test_forget_tries_all_tiers_before_it_raises(tmp_path):
    cache, disk, key = make_disk_cache(tmp_path)
    block = cache.block_pool.get_cached_block(key[:-4], [0])[0]
    cache.tiers[0].put([key], cache.storage, [block.block_id])
    cache._stack.tiers = tuple(reversed(cache.tiers))
    with failing_writes(disk), pytest.raises(TierError):
        cache.forget([key])
    assert [key in tier for tier in cache.tiers] == [False, False]
    cache.close()


def test_a_forget_stays_interrupted_though_the_disk_fails(tmp_path, monkeypatch):
    """The error of the disk would say that all other tiers were tried."""
    cache, disk, key = make_disk_cache(tmp_path)

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.tiers[0], "forget", interrupt)
    with failing_writes(disk), pytest.raises(KeyboardInterrupt):
        cache.forget([key])
    assert cache.block_pool.is_changing


def test_prefetch_without_a_thread_is_skipped(tmp_path):
    cache, _, key = make_disk_cache(tmp_path)
    with no_new_threads():
        assert cache.prefetch("r", [key]) == 0
    assert cache.prefetch("r", [key]) == 1
    assert cache.wait_for_prefetch(60)
    cache.close()


def test_blocks_released_by_retention_are_offloaded():
    now = [0.0]
    pool = BlockPool(5, True, 4)
    retention = BlockRetention(pool, clock=lambda: now[0])
    manager = KVCacheManager(pool, groups=[FullAttentionSpec(block_size=4)], retention=retention)
    cache = TieredCache(pool, None, [Tier(9)])
    request = Request("kept", range(9), HASHER)
    retention.set_directives("kept", [RetentionDirective(0, 8, priority=90)])
    manager.allocate_slots(request, 9)
    request.num_computed_tokens = 9
    manager.free(request)
    other = Request("other", range(100, 116), HASHER)
    manager.allocate_slots(other, 16)
    assert set(cache.tiers[0].list_keys()) == {block_hash + bytes(4) for block_hash in request.block_hashes}


def make_filled_engine(folder, **options):
    engine = TierEngine(folder, **options)
    for first in range(4):
        engine.compute(request := engine.make_request(f"r{first}", [first] * 17))
        engine.manager.free(request)
    return engine


def queue_a_foreign_block(cache):
    block = KVCacheBlock(1)
    block.set_block_hash(bytes(36), 4)
    cache._through[block] = (block.block_hash, block.generation, False)


@pytest.mark.parametrize(
    ("number", "damage"),
    [
        ("X1", lambda cache: setattr(cache.tiers[0], "capacity", 1)),
        (
            "X2",
            lambda cache: cache.tiers[0]._slot_of.update(dict.fromkeys(cache.tiers[0].list_keys(), 0)),
        ),
        ("X3", lambda cache: cache.tiers[0]._free_slots.append(0)),
        ("X4", lambda cache: cache.tiers[1]._files.wipe(0)),
        ("X5", lambda cache: setattr(cache.block_pool, "lower_tiers", None)),
        ("X6", queue_a_foreign_block),
    ],
)
def test_invariant_checks_name_the_damage(tmp_path, number, damage):
    engine = make_filled_engine(tmp_path, num_host_blocks=2)
    invariants.check(engine.onboarder)
    damage(engine.cache)
    with pytest.raises(AssertionError, match=number):
        invariants.check(engine.onboarder)


@pytest.mark.parametrize(
    ("number", "damage"),
    [
        ("X7", lambda engine, plan: engine.onboarder._plans.by_request.update(other=plan)),
        ("X8", lambda engine, plan: engine.pool.touch(plan.list_blocks()[:1])),
        ("X9", lambda engine, plan: engine.cache._stack.hold(plan.keys[:1])),
    ],
)
def test_invariant_checks_name_a_damaged_plan(tmp_path, number, damage):
    engine = make_filled_engine(tmp_path)
    request = engine.make_request("again", [0] * 17)
    plan = engine.onboarder.plan_onboard(request, engine.onboarder.find_prefix(request))
    invariants.check(engine.onboarder)
    damage(engine, plan)
    with pytest.raises(AssertionError, match=number):
        invariants.check(engine.onboarder)


def make_bytes(pool):
    """Return an array with one hash per block, and a storage over it."""
    content = np.zeros((pool.num_gpu_blocks, 32), np.uint8)
    return content, BlockStorage.wrap_state([content])


def cache_bytes(cache, content, name, tokens):
    """Run a step that fills and caches blocks."""
    request, pool = Request(name, tokens, HASHER), cache.block_pool
    blocks = pool.get_new_blocks(len(request.block_hashes))
    pool.cache_full_blocks(request, blocks, 0, len(blocks), 4, 0)
    cache.flush()
    for block, block_hash in zip(blocks, request.block_hashes, strict=True):
        content[block.block_id] = np.frombuffer(block_hash, np.uint8)
    return request, blocks


def check_bytes(cache, tier):
    read = tier.read(tier.list_keys())
    for key, block_id in zip(read.keys, read.block_ids, strict=True):
        assert read.storage.read_block(block_id) == key[:32]


@pytest.mark.parametrize("make_pool", [BlockPool, RunBlockPool])
def test_shrinking_a_pool_offloads_pending_blocks(make_pool):
    """A flush read beyond the end of the pool; only `compaction.shrink` offloaded these bytes first."""
    pool = make_pool(9, True, 4)
    content, storage = make_bytes(pool)
    cache = TieredCache(pool, storage, [HostTier(8, storage)])
    _, blocks = cache_bytes(cache, content, "a", range(32))
    pool.free_blocks(blocks)
    taken = pool.get_new_blocks(8)
    pool.free_blocks(taken)
    pool.remove_last_blocks(4)
    assert not cache._pending
    content[5:] = 0  # another owner overwrites them
    cache.flush()
    assert (len(cache.tiers[0]), cache.num_dropped) == (8, 0)
    check_bytes(cache, cache.tiers[0])


def test_compaction_offloads_pending_blocks_first():
    pool = RunBlockPool(9, True, 4)
    content, storage = make_bytes(pool)
    cache = TieredCache(pool, storage, [HostTier(8, storage)])
    _, blocks = cache_bytes(cache, content, "a", range(32))
    pool.free_blocks(blocks[:4])
    taken = pool.get_new_blocks(4)
    assert len(cache._pending) == 4
    pool.free_blocks(taken)
    assert pack(pool, storage.apply_moves)
    assert not cache._pending
    assert (len(cache.tiers[0]), cache.num_dropped) == (4, 0)
    check_bytes(cache, cache.tiers[0])


class TwoAlike:
    """Two requests with one prompt of a block; what `a` writes is 7, what is in memory before is 99."""

    def __init__(self):
        self.pool = BlockPool(6, True, 4)
        self.manager = KVCacheManager(self.pool)
        storage = make_host_buffer(8, 6, "the test")
        self.rows = view_rows(storage)
        self.rows[:] = 99
        self.host = HostTier(10, storage)
        self.cache = TieredCache(self.pool, storage, [self.host], write="through")
        self.requests = [Request(name, [1, 2, 3, 4], HASHER) for name in "ab"]

    def start(self, number):
        assert self.manager.allocate_slots(self.requests[number], 4) is not None
        return self.manager.get_block_ids(self.requests[number].request_id)[0]

    def write(self, block_id):
        self.rows[block_id] = 7
        self.cache.flush()
        self.cache.flush()

    def read(self):
        """Return the byte that the tier has for the prompt; None for none."""
        key = make_block_hash_with_group_id(self.requests[0].block_hashes[0], 0)
        if key not in self.host.list_keys():
            return None
        out = make_host_buffer(8, 1, "the test")
        self.host.load([key], out, [0])
        return int(view_rows(out)[0, 0])


@pytest.mark.parametrize("is_later", [False, True])
def test_of_two_blocks_with_a_key_the_written_one_is_stored(is_later):
    """The other one, freed and reused before its step, was stored with its old bytes."""
    life = TwoAlike()
    block_id = life.start(0)
    if is_later:
        life.cache.flush()
        life.rows[block_id] = 7
        life.requests[0].num_computed_tokens = 4
    life.start(1)
    life.manager.free(life.requests[1])
    assert life.manager.allocate_slots(Request("other", range(100, 116), HASHER), 16) is not None
    life.cache.flush()
    life.write(block_id)
    assert life.read() == 7


def test_a_key_that_was_evicted_is_written_through_again():
    life = TwoAlike()
    life.pool.evict_blocks([life.start(0)])
    block_id = life.start(1)
    life.cache.flush()
    life.requests[1].num_computed_tokens = 4
    life.write(block_id)
    assert life.read() == 7
