import gc
import weakref
from types import SimpleNamespace

import pytest
from drawing import GROUP, blocks, cache, hash_of, make_pool, make_request, state

from kv_pool import (
    BlockPool,
    CorruptedPoolError,
    FreeKVCacheBlockQueue,
    InvalidArgumentError,
    InvalidBlockError,
    KVCacheBlock,
    OutOfBlocksError,
    PoolInterruptedError,
)
from kv_pool.core import invariants
from kv_pool.core.block import COMPILED

# ---- construction


def test_all_blocks_of_a_new_pool_but_the_null_block_are_free():
    pool = BlockPool(4, True, 16)
    assert state(pool) == "free: 1 2 3"
    assert pool.null_block is pool.blocks[0]
    assert pool.null_block.is_null
    assert [block.block_id for block in pool.blocks] == [0, 1, 2, 3]
    assert pool.get_num_free_blocks() == 3
    assert pool.get_usage() == 0.0
    assert pool.kv_event_queue == []


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks):
    with pytest.raises(InvalidArgumentError, match=f"num_gpu_blocks is {num_blocks}"):
        BlockPool(num_blocks, True, 16)
    with pytest.raises(AssertionError):
        BlockPool(num_blocks, True, 16)


def test_a_hash_block_size_below_one_is_refused():
    with pytest.raises(InvalidArgumentError, match="hash_block_size is 0"):
        BlockPool(4, True, 0)


def test_a_dropped_pool_is_freed_at_once_without_the_cyclic_gc():
    gc.collect()
    gc.disable()
    try:
        pool = make_pool("free: 3 1* | in use: 2*")
        gone = weakref.ref(pool)
        del pool
        assert gone() is None
    finally:
        gc.enable()


def test_a_pool_accepts_attributes_and_keeps_its_event_queue():
    pool = make_pool("free: 1")
    pool.note = "mine"
    del pool.note
    assert not hasattr(pool, "note")
    with pytest.raises(AttributeError):
        del pool.kv_event_queue
    assert pool.kv_event_queue == []


def test_a_subclass_can_redirect_the_event_queue():
    class Shared(BlockPool):
        def __init__(self, events):
            self.shared = events
            super().__init__(4, True, 4, enable_kv_cache_events=True)

        @property
        def kv_event_queue(self):
            return self.shared

        @kv_event_queue.setter
        def kv_event_queue(self, events):
            assert events == []

    events = []
    pool = Shared(events)
    cache(pool, pool.get_new_blocks(1)[0])
    assert len(events) == 1
    pool.evict_blocks({1})
    assert [type(event).__name__ for event in events] == ["BlockStored", "BlockRemoved"]


# ---- taking


def test_requesting_more_than_is_free_changes_nothing():
    pool = make_pool("free: 3 4 1* 2*")
    with pytest.raises(OutOfBlocksError, match="asked for 5 blocks, 4 are free of 4"):
        pool.get_new_blocks(5)
    with pytest.raises(ValueError, match="Cannot get 5 free blocks from the pool"):
        pool.get_new_blocks(5)
    assert state(pool) == "free: 3 4 1* 2*"


def test_a_free_block_with_references_is_found_and_repaired():
    pool = make_pool("free: 1 2 3")
    pool.blocks[2].ref_cnt = 1
    with pytest.raises(CorruptedPoolError, match="block 2 was in the free queue with ref_cnt 1"):
        pool.get_new_blocks(3)
    with pytest.raises(PoolInterruptedError, match="an earlier call of this pool was interrupted"):
        pool.get_new_blocks(1)
    pool.repair()
    assert state(pool) == "free: 1 2 3"
    invariants.check(pool)


# ---- touching


@pytest.mark.parametrize("order", [(3, 4, 1), (1, 4, 3), (4, 4, 3), (2, 3, 2, 1, 4), (5, 1, 5, 2)])
def test_a_failed_touch_restores_queue_positions(order):
    pool = make_pool("free: 3 4 1* 2* | in use: 5")
    stranger = make_pool("free: 2 | in use: 1").blocks[1]
    with pytest.raises(InvalidBlockError, match="belongs to another pool"):
        pool.touch([pool.null_block, *blocks(pool, *order), stranger])
    assert state(pool) == "free: 3 4 1* 2* | in use: 5"
    invariants.check(pool)
    pool.touch(blocks(pool, *order))
    invariants.check(pool)


def test_a_bare_block_can_only_be_touched_while_it_is_referenced():
    pool = make_pool("free: 1")
    bare = KVCacheBlock(1000, ref_cnt=1)
    pool.touch([bare])
    assert bare.ref_cnt == 2
    elsewhere = KVCacheBlock(1002)
    other_queue = FreeKVCacheBlockQueue([elsewhere])
    with pytest.raises(InvalidBlockError, match="block 1002 has ref_cnt 0"):
        pool.touch([elsewhere])
    assert other_queue.popleft() is elsewhere
    never_free = KVCacheBlock(1001)
    with pytest.raises(RuntimeError, match="block 1001 has ref_cnt 0 but is not in this pool"):
        pool.touch([pool.blocks[1], never_free])
    assert state(pool) == "free: 1"


# ---- freeing


def test_freed_blocks_with_a_hash_go_to_the_back():
    """Two requests share 1 2 3; the first also has 4, the second 5. Each is freed tail first."""
    pool = make_pool("free: 6 7 | in use: 1*x2 2*x2 3*x2 4 5")
    pool.free_blocks(reversed(blocks(pool, 1, 2, 3, 4)))
    assert state(pool) == "free: 4 6 7 | in use: 1* 2* 3* 5"
    pool.free_blocks(reversed(blocks(pool, 1, 2, 3, 5)))
    assert state(pool) == "free: 5 4 6 7 3* 2* 1*"


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_double_free_changes_nothing(position):
    pool = make_pool("free: 4 5* | in use: 1*x2 2 3")
    listed = blocks(pool, 1, 2)
    listed.insert(position, pool.blocks[5])
    with pytest.raises(InvalidBlockError, match=r"block 5 is free; .* Was it freed twice\?"):
        pool.free_blocks(listed)
    assert state(pool) == "free: 4 5* | in use: 1*x2 2 3"
    invariants.check(pool)


def test_an_iterable_that_raises_changes_nothing():
    pool = make_pool("free: 3 | in use: 1 2")

    def broken():
        yield pool.blocks[1]
        raise KeyError("gone")

    with pytest.raises(KeyError):
        pool.free_blocks(broken())
    assert state(pool) == "free: 3 | in use: 1 2"


def test_blocks_of_other_pools_are_freed_there_in_order():
    pool = make_pool("free: 2 | in use: 1")
    host = make_pool("free: 4 | in use: 1* 2 3")
    disk = make_pool("free: 2 | in use: 1")
    mixed = [host.blocks[3], pool.blocks[1], disk.blocks[1], host.blocks[1], host.blocks[2]]
    pool.free_blocks(mixed)
    assert state(pool) == "free: 1 2"
    assert state(host) == "free: 3 2 4 1*"
    assert state(disk) == "free: 1 2"


def test_a_double_free_in_another_pool_changes_nothing_in_either():
    pool = make_pool("free: 2 | in use: 1")
    host = make_pool("free: 2 3 | in use: 1")
    for listed in (
        [host.blocks[1], pool.blocks[1], host.blocks[2]],
        [host.blocks[1], pool.blocks[1], host.blocks[1]],
    ):
        with pytest.raises(InvalidBlockError, match="of another pool is free"):
            pool.free_blocks(listed)
        assert state(pool) == "free: 2 | in use: 1"
        assert state(host) == "free: 2 3 | in use: 1"


def test_a_block_of_a_deleted_pool_cannot_be_freed():
    pool = make_pool("free: 2 | in use: 1")
    orphan = make_pool("free: 2 | in use: 1").blocks[1]
    with pytest.raises(InvalidBlockError, match="belongs to a pool that was deleted"):
        pool.free_blocks([pool.blocks[1], orphan])
    assert state(pool) == "free: 2 | in use: 1"


@pytest.mark.parametrize("name", ["the pool's", "a block's"])
def test_an_assigned_owner_does_not_free_a_block_over_and_over(name):
    """The pool took its own block for another pool's, and called itself until the stack was full."""
    pool = make_pool("free: 2 | in use: 1")
    if name == "a block's":
        pool.blocks[1].owner = lambda: pool
    elif COMPILED:
        with pytest.raises(AttributeError):
            pool.block_owner = None
        return
    else:
        pool.block_owner = None
    with pytest.raises(InvalidBlockError, match="do not assign"):
        pool.free_blocks([pool.blocks[1]])
    assert pool.blocks[1].ref_cnt == 1
    assert pool.get_num_free_blocks() == 1


def test_a_bare_block_is_freed_without_checks():
    """vLLM's managers are tested with blocks that never had references."""
    pool = make_pool("free: 1")
    bare = KVCacheBlock(1000)
    pool.free_blocks([bare])
    assert bare.ref_cnt == -1
    assert state(pool) == "free: 1"


# ---- prefix cache


def test_a_hash_is_replaced_only_by_one_that_covers_more_tokens():
    pool = make_pool("free: 2 | in use: 1", enable_kv_cache_events=True)
    request = make_request([hash_of(10), hash_of(11)])
    pool.cache_full_blocks(request, blocks(pool, 1), 0, 1, 4, 0)
    pool.take_events()
    with pytest.raises(AssertionError, match="block 1 is already cached for 4 tokens"):
        pool.cache_full_blocks(request, blocks(pool, 1), 0, 1, 4, 0)
    assert pool.take_events() == []
    pool.cache_full_blocks(request, blocks(pool, 1), 0, 1, 8, 0)
    assert [type(event).__name__ for event in pool.take_events()] == ["BlockRemoved", "BlockStored"]
    assert pool.blocks[1].block_hash == hash_of(11) + GROUP
    invariants.check(pool)


def test_an_event_carries_the_extra_keys_of_its_hashes():
    pool = make_pool("free: 3 | in use: 1 2", enable_kv_cache_events=True)
    request = make_request(
        [hash_of(1), hash_of(2)],
        lora_request=SimpleNamespace(adapter_id=7, name="a", lora_name="a", lora_path="/a"),
        mm_features=[SimpleNamespace(identifier="img", mm_position=SimpleNamespace(offset=2, length=4))],
        cache_salt="salt",
        session_id="s",
    )
    pool.cache_full_blocks(request, blocks(pool, 1, 2), 0, 2, 4, 0)
    (event,) = pool.take_events()
    assert event.extra_keys == [("a", ("img", 2), "salt"), ("a", ("img", -2))]
    assert (event.lora_id, event.lora_name, event.session_id) == (7, "a", "s")
    assert (event.group_idx, event.medium) == (0, "GPU")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 3, 4, 0), r"blocks 0\.\.3 of a table of 2 blocks"),
        ((-1, 2, 4, 0), r"blocks -1\.\.2"),
        ((0, 2, 8, 0), "has 2 block hashes of 4 tokens; .* needs 4"),
        ((0, 2, 6, 0), "block_size 6 is not a multiple of hash_block_size 4"),
        ((0, 2, 0, 0), "block_size 0 is not a multiple"),
        ((0, 2, 4, -1), "group id -1 is not in"),
        ((0, 2, 4, 2**32), "group id 4294967296 is not in"),
        ((0, 2, 4, 0, [True]), "block_mask has 1 flags for 2 blocks"),
    ],
)
def test_a_range_that_does_not_fit_caches_nothing(arguments, message):
    pool = make_pool("free: 3 | in use: 1 2")
    request = make_request([hash_of(1), hash_of(2)])
    with pytest.raises(InvalidArgumentError, match=message):
        pool.cache_full_blocks(request, blocks(pool, 1, 2), *arguments)
    assert state(pool) == "free: 3 | in use: 1 2"


def test_a_bad_block_in_the_middle_caches_nothing():
    pool = make_pool("free: 4 | in use: 1 2* 3")
    request = make_request([hash_of(n) for n in (11, 12, 13)])
    with pytest.raises(InvalidBlockError, match="block 4 is free"):
        pool.cache_full_blocks(request, blocks(pool, 1, 4, 3), 0, 3, 4, 0)
    pool.blocks[2]._block_hash_num_tokens = 99
    with pytest.raises(InvalidBlockError, match="block 2 is already cached for 99 tokens"):
        pool.cache_full_blocks(request, blocks(pool, 1, 2, 3), 0, 3, 4, 0)
    with pytest.raises(TypeError):
        pool.cache_full_blocks(request, [pool.blocks[1], 2, pool.blocks[3]], 0, 3, 4, 0)
    assert state(pool) == "free: 4 | in use: 1 2* 3"


@pytest.mark.parametrize("unknown", [-1, 5, 10**6, 2**31, 2**63, -(2**63) - 1, 2**200])
def test_an_unknown_id_evicts_nothing(unknown):
    pool = make_pool("free: 1* 2* 3* 4*")
    with pytest.raises(InvalidBlockError, match=f"Invalid block_id {unknown}: this pool has blocks 0..4"):
        pool.evict_blocks([1, 2, unknown])
    with pytest.raises(AssertionError):
        pool.evict_blocks({unknown})
    with pytest.raises(TypeError):
        pool.evict_blocks([1, "2"])
    assert state(pool) == "free: 1* 2* 3* 4*"


# ---- particular blocks, other ids, other sizes


def other_block(pool):
    return make_pool("free: 1").blocks[1]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda pool: pool.blocks[6],
        lambda pool: pool.blocks[2],
        lambda pool: pool.null_block,
        other_block,
        lambda pool: KVCacheBlock(3),
        lambda pool: "no block",
    ],
    ids=["in use", "listed twice", "null", "another pool's", "bare", "no block"],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_block_that_cannot_be_taken_changes_nothing(wrong, position):
    picture = "free: 1 2* 3 | in use: 4 5 6"
    pool = make_pool(picture)
    listed = blocks(pool, 2, 1)
    listed.insert(position, wrong(pool))
    with pytest.raises((InvalidBlockError, TypeError)):
        pool.take_blocks(listed)
    assert state(pool) == picture
    invariants.check(pool)


def test_an_id_swap_keeps_copies_and_secondary_keys_in_order():
    pool = make_pool("free: 1 2 | in use: 3 4 5")
    for block in blocks(pool, 5, 3):
        cache(pool, block, 9)
    pool.cache_partial_block(make_request([b"second"]), pool.blocks[5], 4, 0, 4)
    pool.cache_partial_block(make_request([b"second"]), pool.blocks[3], 4, 0, 4)
    first, second = blocks(pool, 5, 3)
    pool.swap_block_ids([(5, 1), (3, 2)])
    for found in (hash_of(9), b"second"):
        assert pool.get_cached_block(found, [0]) == [first]
    assert sorted(pool.cached_block_hashes_by_block) == [1, 2]
    invariants.check(pool)
    pool.evict_blocks([1])
    assert pool.get_cached_block(b"second", [0]) == [second]
    invariants.check(pool)


@pytest.mark.parametrize("pairs", [[(1, 1)], [(1, 2), (2, 3)], [(0, 1)], [(1, 6)], [(-1, 2)]])
def test_ids_that_cannot_be_swapped_change_nothing(pairs):
    picture = "free: 1 2* 3 | in use: 4*x2 5"
    pool = make_pool(picture)
    with pytest.raises(InvalidBlockError, match=r"distinct ids|outside 1\.\.5"):
        pool.swap_block_ids(pairs)
    assert state(pool) == picture
    invariants.check(pool)
