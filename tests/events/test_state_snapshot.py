"""Snapshots for readers that connect late."""

import threading
from itertools import pairwise

import pytest
from events.made_events import draw, made, removed, snap, stored

from kv_pool import AllBlocksCleared
from kv_pool.events.invariants import Reader
from kv_pool.events.stream_state import StreamState
from kv_pool.threads import YieldTimer


def test_chain_becomes_one_event_however_it_was_stored():
    assert snap(made(stored([1, 2]), stored([3], 2), stored([4, 5], 3))) == ["clear", "> 1 2 3 4 5"]


def test_chain_ends_where_it_forks():
    state = made(stored([1, 2, 3]), stored([5, 6], 2), stored([7], 2))
    assert snap(state) == ["clear", "> 1 2 3", "2 > 7", "2 > 5 6"]


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_name": "a"},
        {"lora_id": 3},
        {"block_size": 1, "token_ids": [5, 6]},
        {"kv_cache_spec_kind": "mamba"},
        {"kv_cache_spec_sliding_window": 8},
        {"token_ids": list(range(9))},
        {"extra_keys": [None, ("salt",)]},
        {"lookahead_token_ids": [[1], [2]]},
    ],
    ids=lambda fields: ", ".join(fields),
)
def test_chain_ends_where_its_kind_changes(fields):
    state = made(stored([1, 2]), stored([3, 4], 2, **fields))
    assert snap(state) == ["clear", "> 1 2", "2 > 3 4"]


def test_snapshot_repeats_all_fields_of_blocks():
    events = [
        stored([1, 2], extra_keys=[None, (("img", -1), "salt")], lora_name="a", lora_id=1, locality="LOCAL"),
        stored([3], 9, lookahead_token_ids=[[7]], token_ids=[2**40, 5], ownership="x", medium="STORAGE"),
        stored([4], group_idx=None, token_ids=[], block_size=0, kv_cache_spec_kind="mamba"),
        stored([b"hash"], group_idx=2, token_ids=[1, 2], kv_cache_spec_sliding_window=3),
    ]
    _, told = made(*events).take_snapshot()
    assert told[0] == AllBlocksCleared()
    assert sorted(told[1:], key=repr) == sorted(events, key=repr)


def test_session_of_a_block_is_not_kept():
    _, (_, told) = made(stored([1], session_id="s-1")).take_snapshot()
    assert told == stored([1])


def test_orphans_come_last_with_their_original_parent():
    state = made(stored([1, 2, 3, 4]), removed(2), stored([9], medium="CPU"))
    assert snap(state) == ["clear", "> 1", "> 9", "2 > 3 4"]


def test_blocks_in_a_parent_cycle_are_stored_once():
    state = made(stored([1, 2], 3), stored([3], 2), stored([4], 4))
    _, events = state.take_snapshot()
    assert sorted(found for event in events[1:] for found in event.block_hashes) == [1, 2, 3, 4]


def test_events_have_no_token_ids_unless_they_are_kept():
    _, (_, told) = made(stored([1, 2]), keeps_token_ids=False).take_snapshot()
    assert (told.block_hashes, told.token_ids, told.block_size) == ([1, 2], [], 2)


def test_snapshot_has_the_number_of_its_last_batch():
    state = StreamState()
    assert state.take_snapshot()[0] == -1
    state.apply([stored([3])], sequence=1000)
    assert state.take_snapshot()[0] == 1000


def test_long_chains_are_split_to_fit_into_chunks():
    numbers = range(1, 1001)
    state = made(stored(numbers))
    _, chunks = state.iter_snapshot()
    clear, *rest = list(chunks)
    assert clear == [AllBlocksCleared()]
    sizes = [sum(len(event.block_hashes) for event in chunk) for chunk in rest]
    assert sizes == [256, 256, 256, 232]
    events = [event for chunk in rest for event in chunk]
    assert [found for event in events for found in event.block_hashes] == list(numbers)
    for before, after in pairwise(events):
        assert after.parent_block_hash == before.block_hashes[-1]


# ---- while batches are applied ------------------------------------------------------------------------


class Interruption(YieldTimer):
    """A timer that applies batches during the pauses of a snapshot's copy."""

    def __init__(self, state, batches):
        super().__init__()
        self.state = state
        self.batches = batches

    def yield_if_due(self):
        for batch in self.batches[:1]:
            del self.batches[0]
            self.state.apply(batch)


@pytest.mark.parametrize(
    "batches",
    [
        [[stored([700], 2)], [stored([701], 700)], [removed(701)]],
        [[stored([501], 500)], [stored([5], 4, medium="CPU")]],
        [[removed(1), removed(7)], [removed(2)]],
        [[removed(0)], [stored([0, 300])]],
        [[stored([9], medium="CPU")], [removed(9, medium="CPU")]],
        [[AllBlocksCleared()]],
        [[AllBlocksCleared()], [stored([2, 3])], [stored([2], medium="CPU")]],
        [[stored([200]), AllBlocksCleared(), stored([1])]],
    ],
    ids=lambda batches: " | ".join(" ".join(draw(batch)) for batch in batches),
)
def test_batches_applied_during_the_copy_are_not_in_a_snapshot(batches):
    places = [stored(range(250)), stored([3, 4], medium="CPU")]
    state = made(stored([7]), *places, removed(100), stored([500], 7))
    reader, late = Reader(), Reader()
    reader.read(state.take_snapshot()[1])
    sequence, chunks = state.iter_snapshot(yield_timer=Interruption(state, list(batches)))
    assert state.last_sequence == sequence + len(batches) == 4 + len(batches)
    for chunk in chunks:
        late.read(chunk)
    assert late.known == reader.known


def test_threaded_snapshots_match_the_state_after_their_batch():
    """Each batch leaves a unique state, so that a snapshot between two batches would be detected."""
    num_batches, num_resident = 3000, 300
    state = StreamState()
    batches = []
    for number in range(num_batches):
        batch = [stored([number, number + 10**6, number + 2 * 10**6])]
        if number >= num_resident:
            old = number - num_resident
            batch += [removed(old + 2 * 10**6), removed(old + 10**6), removed(old)]
        if number % 1000 == 999:
            batch = [AllBlocksCleared(), *batch[:1]]
        batches.append(batch)
    snapshots = []
    stop = threading.Event()

    def take_snapshots():
        while not stop.is_set():
            sequence, chunks = state.iter_snapshot(yield_timer=YieldTimer(work_ns=20_000))
            snapshots.append((sequence, [event for chunk in chunks for event in chunk]))

    thread = threading.Thread(target=take_snapshots)
    thread.start()
    expected, reader = [], Reader()
    try:
        for batch in batches:
            reader.read(state.apply(batch))
            expected.append(dict(reader.known))
            if len(expected) % 50 == 0:
                YieldTimer(work_ns=0).yield_if_due()
    finally:
        stop.set()
        thread.join()
    snapshots.append(state.take_snapshot())
    assert len(snapshots) >= 5
    for sequence, events in snapshots:
        late = Reader()
        late.read(events)
        assert late.known == (expected[sequence] if sequence >= 0 else {})


def test_memory_of_cleared_blocks_is_freed_by_later_batches():
    state = made(stored(range(2000)), AllBlocksCleared())
    assert state.resident._forgotten
    state.apply([])
    state.apply([])
    assert not state.resident._forgotten
