"""Calls of a `PoolSite` over a `GPUKVPool` interrupted by a signal handler leave nothing behind."""

import random

import pytest
from adapter.made_pool import check, make, make_site, make_storage, take
from drawing import hash_of
from interrupting import interrupt_everywhere, interrupt_twice_at_random

from kv_pool.migration.subjects import BlocksSubject, PrefixSubject, SequenceSubject

HASHES = [hash_of(number) for number in range(3)]
SUBJECTS = {
    "a sequence": SequenceSubject(1),
    "blocks": BlocksSubject((1, 2, 4)),
    "a prefix": PrefixSubject(tuple(HASHES)),
}


class Arrival:
    """Prepare a migration to a pool that has one of its blocks, up to the state before a call."""

    def __init__(self, subject, until):
        self.subject = subject
        here = make(storage=make_storage())
        take(here, 1, 3)
        take(here, 2, 1)
        here.cache_prefix(1, HASHES)
        pool = make(8, device_id=1, storage=make_storage(9), enable_kv_cache_events=True)
        take(pool, 2, 2)
        take(pool, 3, 1)
        pool.cache_prefix(3, HASHES[:1])
        pool.free_sequence(3)
        self.site = make_site(pool)
        source = make_site(here)
        self.selection = source.select(subject, False)
        self.reservation = None
        for call in ("reserve", "insert"):
            if call == until:
                break
            getattr(self, call)()

    def reserve(self):
        self.reservation = self.site.reserve(self.subject, self.selection.offered, self.selection.state)

    def insert(self):
        self.site.insert(self.reservation)

    def adopt(self):
        self.site.adopt(self.reservation)

    def leave(self):
        self.site.release_reservation(self.reservation)

    def check(self):
        """The reservation is complete and can be dropped, or does not exist."""
        pool = self.site.sequences.gpu_pool
        pool.note_access(2)
        if self.reservation is not None and not self.reservation.hold.is_released:
            self.site.release_reservation(self.reservation)
        check(pool)
        assert [hold.reason for hold in pool.block_pool.holds.list_holds()] == ["pinned"]
        assert not pool.holdings.frozen
        cached = set()
        for event in pool.block_pool.take_events():
            change = cached.difference if "Removed" in type(event).__name__ else cached.union
            cached = change((one, event.group_idx) for one in event.block_hashes)
        assert len(cached) == len(list(pool.block_pool.iter_cached_keys()))


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("call", ["reserve", "insert", "adopt", "leave"])
def test_an_interrupted_arrival_is_complete_or_droppable(call, subject):
    tried, broken = interrupt_everywhere(
        lambda: Arrival(SUBJECTS[subject], call), lambda arrival: getattr(arrival, call)(), Arrival.check
    )
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


class Owner:
    """A sequence owner that records its notifications for each sequence."""

    def __init__(self):
        self.state_of = {}

    def describe(self, sequence_id):
        return b""

    def list_token_ids(self, sequence_id):
        return ()

    def suspend(self, sequence_id):
        self.state_of[sequence_id] = "suspended"

    def resume(self, sequence_id):
        self.state_of[sequence_id] = "running"

    def on_departed(self, sequence_id, target):
        assert self.state_of[sequence_id] == "suspended", "told twice"
        self.state_of[sequence_id] = target


class Departure:
    """Prepare a migration from a pool where a block is shared, up to the state before a call."""

    def __init__(self, subject, is_frozen):
        self.subject = subject
        self.pool = make(storage=make_storage(), enable_kv_cache_events=True)
        take(self.pool, 1, 4)
        self.pool.cache_prefix(1, HASHES)
        self.pool.fork(1, 2, 1)
        take(self.pool, 3, 2)
        self.owner = Owner()
        self.site = make_site(self.pool, owner=self.owner)
        self.selection = self.site.select(subject, True)
        if is_frozen:
            self.freeze()

    def freeze(self):
        self.site.freeze(self.subject)

    def thaw(self):
        self.site.thaw(self.subject)

    def release(self):
        self.site.release(self.subject, "there")

    def check(self):
        """The blocks are here, frozen or not, or gone; leaving and staying are both still possible."""
        self.site._recover()
        self.check_balance()
        has_left = len(self.pool.blocks_of(1)) < 4
        if has_left:
            assert not self.site._frozen
        else:
            if not self.site._frozen:
                self.freeze()
                self.check_balance()
            self.thaw()
            self.check_balance()
            self.freeze()
            self.release()
            self.check_balance()
        is_sequence = self.subject == SUBJECTS["a sequence"]
        assert self.pool.blocks_of(1) == ([] if is_sequence else [3])
        assert self.pool.get_free_blocks() == (7 if is_sequence else 6)

    def check_balance(self):
        pool, site = self.pool, self.site
        check(pool)
        frozen = set(site.list_frozen())
        assert set(pool.holdings.frozen) == frozen
        assert len([one for one in pool.block_pool.holds.list_holds() if one.reason != "pinned"]) == len(
            frozen
        )
        if self.subject == SUBJECTS["a sequence"]:
            is_gone = 1 not in pool.list_sequences()
            state = "there" if is_gone else "suspended" if frozen else "running"
            assert self.owner.state_of.get(1, "running") == state


DEPARTURES = {"freeze": False, "thaw": True, "release": True}


@pytest.mark.parametrize("subject", ["a sequence", "blocks"])
@pytest.mark.parametrize("call", DEPARTURES)
def test_an_interrupted_departure_is_complete_or_undone(call, subject):
    tried, broken = interrupt_everywhere(
        lambda: Departure(SUBJECTS[subject], DEPARTURES[call]),
        lambda departure: getattr(departure, call)(),
        Departure.check,
    )
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("subject", ["a sequence", "blocks"])
@pytest.mark.parametrize("call", DEPARTURES)
def test_an_interrupted_departure_recovery_is_consistent(call, subject):
    tried, broken = interrupt_twice_at_random(
        lambda: Departure(SUBJECTS[subject], DEPARTURES[call]),
        lambda departure: getattr(departure, call)(),
        Departure.check,
        random.Random(call),
        40,
    )
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("call", ["reserve", "adopt", "leave"])
def test_an_interrupted_arrival_recovery_is_consistent(call):
    def check_arrival(arrival):
        arrival.site._recover()
        arrival.check()

    tried, broken = interrupt_twice_at_random(
        lambda: Arrival(SUBJECTS["blocks"], call),
        lambda arrival: getattr(arrival, call)(),
        check_arrival,
        random.Random(call),
        40,
    )
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"
