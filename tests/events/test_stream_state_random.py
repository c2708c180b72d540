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


def is_pending(sent, *removal):
    """Return whether the event of consecutive removals from one place that ends `sent` has this one."""
    for one in reversed(sent):
        if one[:2] != removal[:2]:
            return False
        if one == removal:
            return True
    return False


class SlowState:
    """A slow model of a state, with one hash per event: a counter and the announced parents."""

    def __init__(self):
        self.copies = Counter()
        self.parents = {}

    def apply(self, events):
        sent = []
        for event in events:
            if isinstance(event, BlockReported):
                continue
            if isinstance(event, AllBlocksCleared):
                self.copies.clear()
                sent.append("clear")
                continue
            place, parent, new = find_place(event), getattr(event, "parent_block_hash", None), []
            before = {number for where, number in self.copies if where == place}
            for number in event.block_hashes:
                key = place, number
                if isinstance(event, BlockStored):
                    self.copies[key] += 1
                    if self.copies[key] == 1:
                        new.append(number)
                        self.parents[key] = None if parent == number else parent
                    parent = number
                else:
                    self.copies[key] -= 1
                    if self.copies[key] <= 0:
                        del self.copies[key]
                        if not is_pending(sent, "-", *key):
                            sent.append(("-", *key))
            sent += self.announce(place, new, before)
        return sent

    def announce(self, place, new, before):
        """Announce new hashes; resident blocks after them are removed and stored again."""
        behind = set()
        while True:
            found = {n for n in before - behind if self.parents[place, n] in {*new, *behind}}
            if not found:
                break
            behind |= found
        if not behind:
            return [(">", place, number) for number in new]
        return [("-", place, behind), (">", place, {*new, *behind})]


def without_again(sent, expected):
    """Split sent events into one hash each; order repeated announcements as `SlowState` does."""
    drawn = []
    for wanted in expected:
        num_hashes = len(wanted[2]) if isinstance(wanted[-1], set) else 1
        taken, sent = sent[:num_hashes], sent[num_hashes:]
        if isinstance(wanted[-1], set):
            numbers = [number for _, _, number in taken]
            assert len(set(numbers)) == len(numbers)
            taken = [(*{taken_one[:2] for taken_one in taken}.pop(), set(numbers))]
        drawn += taken
    return drawn + sent


def one_by_one(events):
    """Split sent events into one hash each."""
    told = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            told.append("clear")
        else:
            sign = "-" if isinstance(event, BlockRemoved) else ">"
            told += [(sign, find_place(event), number) for number in event.block_hashes]
    return told


@pytest.mark.parametrize("seed", range(3))  # hypothesis draws other cases for each
@settings(max_examples=200, deadline=None)
@given(batches=st.lists(st.lists(events, max_size=6), max_size=8))
def test_random_events_match_a_slow_model(seed, batches):
    state = StreamState()
    model, reader = SlowState(), Reader()
    for number, batch in enumerate(batches):
        before = draw(batch)
        sent = state.apply(batch)
        assert draw(batch) == before
        expected = model.apply(batch)
        assert without_again(one_by_one(sent), expected) == expected
        for event in sent:
            if isinstance(event, BlockStored):
                invariants.check_store(event, reader)
            reader.read([event])
        assert model.copies.keys() == reader.known.keys()
        copies = {(place, found): num_copies for place, found, num_copies in state.resident}
        assert copies == dict(model.copies)
        sequence, snapshot = state.take_snapshot()
        assert sequence == number
        late = Reader()
        for event in snapshot[1:]:
            invariants.check_store(event, late)
            late.read([event])
        assert late.known.keys() == reader.known.keys()
        invariants.check_knowledge(state, reader, late)
