"""Each invariant of the stream detects the corresponding damage."""

import pytest
from drawing import blocks, hash_of, make_pool, make_request
from events.made_events import removed, stored

from kv_pool import CorruptedPoolError
from kv_pool.events.invariants import Reader, check_events, check_knowledge, check_resident
from kv_pool.events.spans import pack_tokens
from kv_pool.events.stream_state import StreamState

REQUEST = make_request([hash_of(number) for number in (11, 12, 13)])


def make_followed():
    """Return a pool with two copies of 11 and one of 12 and 13, its state, and a reader."""
    pool = make_pool("free: 5 | in use: 1 2 3 4", enable_kv_cache_events=True)
    pool.cache_full_blocks(REQUEST, blocks(pool, 1, 2, 3), 0, 3, 4, 0)
    pool.cache_full_blocks(REQUEST, blocks(pool, 4), 0, 1, 4, 0)
    state, reader = StreamState(), Reader()
    reader.read(state.apply(pool.take_events()))
    return pool, state, reader


def find_block(state, position):
    """Return the blocks of the only place, and the hash at this position of the sequence."""
    (found,) = state.resident.places.values()
    chain = [block_hash for event in state.take_snapshot()[1][1:] for block_hash in event.block_hashes]
    return found, chain[position]


def test_followed_pool_satisfies_all_invariants():
    pool, state, reader = make_followed()
    check_resident(state, pool)
    check_knowledge(state, reader)


def test_e1_detects_a_lost_event():
    pool, state, _ = make_followed()
    pool.evict_blocks([2])
    pool.take_events()
    with pytest.raises(CorruptedPoolError, match=r"E1: .* is resident, but not cached"):
        check_resident(state, pool)


def test_e1_detects_a_lost_hash():
    pool, state, _ = make_followed()
    found, block_hash = find_block(state, 1)
    del found.held.values[block_hash]
    with pytest.raises(CorruptedPoolError, match=r"E1: .* is cached, but not resident"):
        check_resident(state, pool)


def test_e2_detects_a_wrong_number_of_copies():
    pool, state, _ = make_followed()
    found, block_hash = find_block(state, 0)
    del found.held.copies[block_hash]
    with pytest.raises(CorruptedPoolError, match=r"E2: .* has 1 copies, but 2 blocks carry it"):
        check_resident(state, pool)


def test_e3_detects_a_reader_that_missed_a_batch():
    pool, state, reader = make_followed()
    pool.evict_blocks([2])
    state.apply(pool.take_events())
    with pytest.raises(CorruptedPoolError, match=r"E3: .* is known, but not resident"):
        check_knowledge(state, reader)
    with pytest.raises(CorruptedPoolError, match=r"E3: .* is not known"):
        check_knowledge(state, Reader())


@pytest.mark.parametrize(
    "damage", [{"parent": 5}, {"tokens": pack_tokens([9] * 12)}, {"lookahead_token_ids": ([1], [2], [3])}]
)
def test_e3_detects_a_snapshot_with_other_fields(damage):
    _, state, reader = make_followed()
    found, block_hash = find_block(state, 0)
    for name, wrong in damage.items():
        setattr(found.held.values[block_hash], name, wrong)
    late = Reader()
    late.read(state.take_snapshot()[1])
    with pytest.raises(CorruptedPoolError, match=r"E3: .* is known as .*, but sent as"):
        check_knowledge(state, reader, late)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([stored([2], 1), stored([1])], "E4: 1 is stored after its child"),
        ([stored([1, 2, 1])], "E5: a hash occurs twice"),
        ([removed(7, 7)], "E5: a hash occurs twice"),
        ([stored([1], 1)], "E5: 1 is its own parent"),
        ([stored([1, 2], token_ids=[1] * 6)], "E6: 6 tokens for 2 blocks of 2"),
        ([stored([], token_ids=[1])], "E6: 1 tokens for 0 blocks"),
        ([stored([1]), stored([2, 1])], "E7: 1 is stored again"),
        ([stored([9])], "E7: 9 is stored again"),
        ([removed(9), removed(9)], r"E7: .* is removed twice"),
    ],
)
def test_e4_to_e7_detect_forbidden_events(events, message):
    reader = Reader()
    reader.read([stored([9])])
    with pytest.raises(CorruptedPoolError, match=message):
        check_events(events, reader)
