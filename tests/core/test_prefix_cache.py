"""Several keys on one block: partial entries, promotion, copies, and their events."""

from contextlib import suppress

import pytest
from drawing import GROUP, blocks, hash_of, ids, make_pool, make_request, state

from kv_pool import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
    InvalidArgumentError,
    InvalidBlockError,
    InvalidTypeError,
    PoolInterruptedError,
)
from kv_pool.core import invariants
from kv_pool.core.block_keys import (
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    make_external_block_hash,
)
from kv_pool.core.kv_events import KVEventTypes
from kv_pool.core.pool_part import PoolPart

REQUEST = make_request([hash_of(number) for number in (11, 12, 13, 14)])


def told(pool):
    """Return the events since the last call: + stored, - removed, by the number of the hash."""
    signs = {"BlockStored": "+", "BlockRemoved": "-"}
    return [
        signs[type(event).__name__] + str(int(found.to_bytes(8, "big")[-4:].decode()))
        for event in pool.take_events()
        for found in event.block_hashes
    ]


def cache_partially(pool, block_id, num_tokens, **more):
    return pool.cache_partial_block(REQUEST, pool.blocks[block_id], num_tokens, 0, 16, **more)


def find(pool, number):
    return ids(pool.get_cached_block(hash_of(number), [0]))


def test_a_key_is_hash_and_group():
    key = make_block_hash_with_group_id(b"hash", 258)
    assert key == b"hash\x00\x00\x01\x02"
    assert get_block_hash(key) == b"hash"
    assert get_group_id(key) == 258
    assert make_external_block_hash(bytes(range(16))) == int.from_bytes(bytes(range(8, 16)), "big")


@pytest.mark.parametrize("group_id", [-1, 2**32])
def test_a_group_id_that_does_not_fit_is_refused(group_id):
    with pytest.raises(InvalidArgumentError, match=f"group id {group_id} is not in"):
        make_block_hash_with_group_id(b"hash", group_id)


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "message"),
    [
        (0, 16, "num_tokens is 0; .* here 4 to 16"),
        (20, 16, "num_tokens is 20"),
        (6, 16, "num_tokens is 6"),
        (-4, 16, "num_tokens is -4"),
        (4, 6, "block_size 6 is not a multiple"),
        (4, 0, "block_size 0 is not a multiple"),
    ],
)
def test_an_invalid_boundary_is_refused(num_tokens, block_size, message):
    pool = make_pool("free: 2 | in use: 1*")
    with pytest.raises(InvalidArgumentError, match=message):
        pool.cache_partial_block(REQUEST, pool.blocks[1], num_tokens, 0, block_size)
    assert state(pool) == "free: 2 | in use: 1*"


def test_with_lookahead_events_carry_the_next_tokens():
    pool = make_pool("free: 3 | in use: 1 2", enable_kv_cache_events=True, num_hash_lookahead_tokens=3)
    pool.cache_full_blocks(REQUEST, blocks(pool, 1, 2), 0, 2, 8, 0)
    (event,) = pool.take_events()
    assert event.lookahead_token_ids == [[8, 9, 10], []]


# ---- blocks that stay readable until they are reused


def test_a_raising_watcher_loses_no_block():
    pool = make_pool("free: 3 | in use: 1* 2*")

    def fail(block):
        raise KeyError("gone")

    pool.unpin_blocks(blocks(pool, 2, 1), fail)
    with pytest.raises(KeyError):
        pool.get_new_blocks(2)
    assert state(pool) == "free: 3 2* 1*"
    invariants.check(pool)


@pytest.mark.parametrize("wrong", [0, 4])
def test_unpinning_a_block_that_is_not_in_use_changes_nothing(wrong):
    pool = make_pool("free: 4 | in use: 1 2*x2 3*")
    seen = []
    with pytest.raises(InvalidBlockError, match=f"block {wrong} is .*; unpin_blocks"):
        pool.unpin_blocks(blocks(pool, 1, wrong, 3), seen.append)
    with pytest.raises(InvalidTypeError):
        pool.unpin_blocks([pool.blocks[1], None], seen.append)
    assert state(pool) == "free: 4 | in use: 1 2*x2 3*"
    pool.get_new_blocks(1)
    assert seen == []


# ---- blocks that do not belong here


@pytest.mark.parametrize(
    "call",
    [
        lambda pool, block: pool.unpin_blocks([block], print),
        lambda pool, block: pool.cache_full_blocks(REQUEST, [pool.null_block, block], 0, 2, 4, 0),
        lambda pool, block: pool.cache_partial_block(REQUEST, block, 8, 0, 16),
        lambda pool, block: pool.move_block_hashes(pool.blocks[1], block),
        lambda pool, block: pool.move_block_hashes(block, pool.blocks[2]),
        lambda pool, block: pool._insert_block_hash(b"key", block, 4),
        lambda pool, block: pool._maybe_evict_cached_block(block),
        lambda pool, block: pool.touch([block]),
    ],
)
def test_a_block_of_another_pool_changes_neither(call):
    pool, other = make_pool("free: 3 | in use: 1* 2"), make_pool("free: 3 | in use: 1 2*")
    for block in blocks(other, 1, 2):
        with pytest.raises(InvalidBlockError, match="belongs to another pool"):
            call(pool, block)
    assert state(pool) == "free: 3 | in use: 1* 2"
    assert state(other) == "free: 3 | in use: 1 2*"
    invariants.check(pool)
    invariants.check(other)


def test_the_null_block_accepts_no_keys():
    pool = make_pool("free: 2 | in use: 1*")
    with pytest.raises(InvalidBlockError, match="the null block is never cached"):
        pool.move_block_hashes(pool.blocks[1], pool.null_block)
    with pytest.raises(InvalidBlockError, match="the null block is never cached"):
        pool._insert_block_hash(b"key", pool.null_block, 4)
    assert state(pool) == "free: 2 | in use: 1*"
    invariants.check(pool)


def test_a_reset_changes_nothing_if_a_watcher_raises():
    pool = make_pool("free: 2* | in use: 1*")

    def fail(block):
        raise KeyError("gone")

    pool.unpin_blocks(blocks(pool, 1), fail)
    with pytest.raises(KeyError):
        pool.reset_prefix_cache()
    assert state(pool) == "free: 2* 1*"
    assert pool.reset_prefix_cache()
    assert state(pool) == "free: 2 1"
    invariants.check(pool)


def make_chain(**options):
    """Return a pool of 9 with free blocks 1 to 4 that hold a sequence of the hashes 11 to 14."""
    pool = make_pool("free: 5 6 7 8 | in use: 1 2 3 4", **options)
    pool.cache_full_blocks(REQUEST, blocks(pool, 1, 2, 3, 4), 0, 4, 4, 0)
    pool.free_blocks(blocks(pool, 4, 3, 2, 1))
    pool.take_events()
    return pool


def look_up(pool, *numbers):
    """Look up all hashes in one call, and check that single calls agree."""
    found = ids(pool.find_cached_prefix([hash_of(number) for number in numbers], 10))
    one_by_one = []
    for number in numbers:
        if find(pool, number) is None:
            break
        one_by_one += find(pool, number)
    assert one_by_one == found
    return found


def test_the_oldest_copy_is_found_despite_a_newer_guess():
    pool = make_chain()
    pool.touch(blocks(pool, 1))
    table = [pool.blocks[1], *pool.get_new_blocks(2)]
    pool.cache_full_blocks(REQUEST, table, 1, 3, 4, 0)  # 5 and 6 are copies of 2 and 3
    assert look_up(pool, 11, 12, 13, 14) == [1, 2, 3, 4]
    pool.evict_blocks([2, 3])
    assert look_up(pool, 11, 12, 13, 14) == [1, 5, 6, 4]
    invariants.check(pool)


def test_lookups_respect_a_map_edited_by_hand():
    pool = make_chain()
    saved = pool.cached_block_hash_to_block._cache.pop(hash_of(12) + GROUP)
    assert look_up(pool, 11, 12, 13) == [1]
    pool.cached_block_hash_to_block._cache[hash_of(12) + GROUP] = saved
    assert look_up(pool, 11, 12, 13) == [1, 2, 3]
    pool.cached_block_hash_to_block.pop(hash_of(13) + GROUP, 3)
    assert look_up(pool, 11, 12, 13) == [1, 2]


def test_a_key_replaced_by_hand_does_not_prevent_reuse():
    pool = make_chain(enable_kv_cache_events=True)
    entries = pool.cached_block_hash_to_block._cache
    entries[b"other"] = entries.pop(hash_of(13) + GROUP)
    pool.get_new_blocks(8)
    assert told(pool) == ["-14", "-12", "-11"]
    assert list(entries) == [b"other"]


def test_an_engine_can_supply_its_own_event_classes():
    class Stored(BlockStored, tag="BlockStored"):
        pass

    class Removed(BlockRemoved, tag="BlockRemoved"):
        pass

    class Cleared(AllBlocksCleared, tag="AllBlocksCleared"):
        pass

    pool = make_chain(enable_kv_cache_events=True, event_types=KVEventTypes(Stored, Removed, Cleared))
    cache_partially(pool, pool.get_new_blocks(1)[0].block_id, 4)
    pool.evict_blocks([1])
    assert not pool.reset_prefix_cache()
    pool.free_blocks(blocks(pool, 5))
    pool.reset_prefix_cache()
    assert [type(event) for event in pool.take_events()] == [Stored, Removed, Cleared]


def test_events_can_carry_whole_hashes():
    pool = make_pool("free: 2 | in use: 1", enable_kv_cache_events=True, use_int_block_hashes=False)
    pool.cache_full_blocks(REQUEST, blocks(pool, 1, 1), 1, 2, 4, 0)
    pool.evict_blocks([1])
    stored, removed = pool.take_events()
    assert (stored.block_hashes, stored.parent_block_hash) == ([hash_of(12)], hash_of(11))
    assert removed.block_hashes == [hash_of(12)]


def announce(mask, **options):
    """Cache blocks 1 to 5 (3 is null) as the hashes 12 to 16 with this mask, and return the events."""
    pool = make_pool("free: 6 | in use: 1 2 3 4 5", enable_kv_cache_events=True, **options)
    table = blocks(pool, 6, 1, 2, 0, 4, 5)
    request = make_request([hash_of(number) for number in range(11, 17)])
    pool.cache_full_blocks(request, table, 1, 6, 4, 0, block_mask=mask)
    return [
        (number_of(event.parent_block_hash), [*map(number_of, event.block_hashes)], event.token_ids)
        for event in pool.take_events()
    ]


def number_of(external_hash):
    return None if external_hash is None else int(external_hash.to_bytes(8, "big")[-4:].decode())


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, [(11, [12, 13], range(4, 12)), (14, [15, 16], range(16, 24))]),
        ([False, True, True, True, True], [(12, [13], range(8, 12)), (14, [15, 16], range(16, 24))]),
        ([True, True, True, True, False], [(11, [12, 13], range(4, 12)), (14, [15], range(16, 20))]),
        ([False] * 5, []),
    ],
    ids=["a hole", "and the first", "and the last", "nothing"],
)
def test_dense_events_carry_only_the_tokens_of_their_blocks(mask, expected):
    assert announce(mask, dense_events=True) == [
        (parent, hashes, list(tokens)) for parent, hashes, tokens in expected
    ]


def test_dense_events_join_the_removals_of_one_call():
    pool = make_pool("free: 7 | in use: 1 2 3 4 5 6", enable_kv_cache_events=True, dense_events=True)
    pool.cache_full_blocks(REQUEST, blocks(pool, 1, 2, 3), 0, 3, 4, 0)
    pool.cache_full_blocks(REQUEST, blocks(pool, 4), 0, 1, 4, 0)
    pool.cache_full_blocks(REQUEST, blocks(pool, 5, 6), 0, 2, 4, 1)
    pool.take_events()
    pool.free_blocks(blocks(pool, 3, 2, 1, 4, 6, 5))
    pool.get_new_blocks(7)
    removals = [(event.group_idx, len(event.block_hashes)) for event in pool.take_events()]
    assert removals == [(0, 3), (0, 1), (1, 2)]


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("caught", [(), Interrupted], ids=["raised", "caught"])
@pytest.mark.parametrize("call", [lambda pool: pool.get_new_blocks(2), BlockPool.reset_prefix_cache])
def test_an_interrupted_call_of_a_watcher_is_not_forgotten(call, caught):
    pool = make_pool("free: 3 | in use: 1* 2*")

    def interrupt(block):
        class Part(PoolPart):
            def note_taken(self, taken):
                raise Interrupted

        pool.parts.append(Part())
        with suppress(caught):
            pool.get_new_blocks(1)

    pool.unpin_blocks(blocks(pool, 1), interrupt)
    pool.free_blocks(blocks(pool, 2))
    with pytest.raises(PoolInterruptedError if caught else Interrupted):
        call(pool)
    with pytest.raises(PoolInterruptedError):
        pool.get_new_blocks(1)
