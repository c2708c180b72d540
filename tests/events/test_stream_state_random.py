"""Random histories: all invariants of the stream after each call, and a slow model."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
from core.plain_operations import run
from core.pool_operations import PoolSide
from events.event_schedule import EventSchedule
from events.made_events import draw, removed, stored
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_pool
from kv_pool import AllBlocksCleared, BlockRemoved, BlockStored
from kv_pool.core.kv_events import BlockReported
from kv_pool.events import invariants
from kv_pool.events.invariants import Reader, find_place
from kv_pool.events.stream_state import StreamState

NUM_STEPS = 300


class DensePool(kv_pool.BlockPool):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, dense_events=True, **options)


DENSE_CLASSES = SimpleNamespace(
    **{**{name: getattr(kv_pool, name) for name in kv_pool.__all__}, "BlockPool": DensePool}
)


@pytest.mark.parametrize("seed", range(150))
def test_random_pool_calls_satisfy_the_stream_invariants(seed):
    schedule = EventSchedule(seed)
    is_dense = seed % 3 != 0
    side = PoolSide(DENSE_CLASSES if is_dense else kv_pool, schedule.options)
    pool = side.pools["gpu"]
    state = StreamState()
    rng = random.Random(seed)
    reader = Reader()
    late_readers = []
    for _ in run(schedule, side, num_steps=NUM_STEPS):
        given = pool.take_events()
        sent = state.apply(given)
        invariants.check_events(sent, reader)
        if is_dense:
            assert all(event.token_ids for event in sent if isinstance(event, BlockStored))
        for one in (reader, *late_readers):
            one.read(sent)
        if rng.random() < 0.05:
            _, snapshot = state.take_snapshot()
            invariants.check_events(snapshot[1:], Reader())
            late_readers = [*late_readers[-2:], Reader()]
            late_readers[-1].read(snapshot)
        invariants.check_resident(state, pool)
        invariants.check_knowledge(state, reader, *late_readers)


# ---- arbitrary events, also beyond those of pools -----------------------------------------------------

hashes = st.integers(1, 6)
places = st.sampled_from([{}, {"medium": "CPU"}, {"group_idx": 1}, {"locality": "REMOTE"}])
removals = st.builds(
    lambda numbers, place: removed(*numbers, **place),
    st.lists(hashes, min_size=1, max_size=3, unique=True),
    places,
)
events = st.one_of(
    st.builds(
        lambda numbers, parent, place, event_class, has_hole: stored(
            numbers, parent, event_class, **place, token_ids=[1] if has_hole else None
        ),
        st.lists(hashes, max_size=5),
        st.none() | hashes,
        places,
        st.sampled_from([BlockStored, BlockStored, BlockStored, BlockReported]),
        st.sampled_from([False, False, False, True]),
    ),
    removals,
    removals,
    st.builds(AllBlocksCleared),
)


LOST = "a batch that was lost"


def count_copies(copies, batch):
    """Count the copies of each hash after a batch; return those that are gone, or were never there."""
    gone = set()
    for event in batch:
        if isinstance(event, AllBlocksCleared):
            copies.clear()
        elif not isinstance(event, BlockReported):
            for key in list_keys([event], type(event)):
                if isinstance(event, BlockStored):
                    copies[key] += 1
                elif copies[key] > 1:
                    copies[key] -= 1
                else:
                    del copies[key]
                    gone.add(key)
    return gone


def list_keys(events, kind):
    """Return the place and hash of each block in the events of a kind."""
    return [
        (find_place(event), number)
        for event in events
        if isinstance(event, kind)
        for number in event.block_hashes
    ]


@pytest.mark.parametrize("seed", range(3))  # hypothesis draws other cases for each
@settings(max_examples=200, deadline=None)
@given(batches=st.lists(st.just(LOST) | st.lists(events, max_size=6), max_size=8))
def test_random_events_match_counted_copies(seed, batches):
    state, reader, copies = StreamState(), Reader(), Counter()
    for number, batch in enumerate(batches):
        if batch is LOST:
            state.skip(number)
            copies.clear()
            assert state.take_snapshot() == (number, [AllBlocksCleared()])
            continue
        before = draw(batch)
        sent = state.apply(batch)
        assert draw(batch) == before
        gone = count_copies(copies, batch)
        for event in sent:
            if isinstance(event, BlockStored):
                invariants.check_store(event, reader)
            elif isinstance(event, BlockRemoved):
                invariants.check_distinct(event)
            reader.read([event])
        assert {(place, found): num_copies for place, found, num_copies in state.resident} == dict(copies)
        removed_keys, stored_keys = ({*list_keys(sent, kind)} for kind in (BlockRemoved, BlockStored))
        assert gone <= removed_keys
        is_cleared = any(isinstance(event, AllBlocksCleared) for event in sent)
        for place, again in removed_keys - gone:  # blocks behind one that was stored again
            assert (place, again) in stored_keys
            if (place, again) in reader.known and not is_cleared:
                assert (place, reader.known[place, again][0]) in stored_keys
        sequence, snapshot = state.take_snapshot()
        assert sequence == number
        late = Reader()
        for event in snapshot[1:]:
            invariants.check_store(event, late)
            late.read([event])
        invariants.check_knowledge(state, reader, late)
