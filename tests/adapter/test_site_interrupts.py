"""Calls of a `GPUKVPoolSite` that a signal handler breaks off: no reference, hold or bar is left behind."""

import pytest
from adapter.made_pool import check, make, make_storage, take
from drawing import hash_of
from interrupting import interrupt_everywhere

from kv_pool.adapter.migration_site import GPUKVPoolSite
from kv_pool.migration.subjects import BlocksSubject, PrefixSubject, SequenceSubject

HASHES = [hash_of(number) for number in range(3)]
SUBJECTS = {
    "a sequence": SequenceSubject(1),
    "blocks": BlocksSubject((1, 2, 4)),
    "a prefix": PrefixSubject(tuple(HASHES)),
}


class Arrival:
    """A subject on its way to a pool that has one of its blocks, as far as before a call."""

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
        self.site = GPUKVPoolSite(pool)
        source = GPUKVPoolSite(here)
        self.selection = source.select(subject, False)
        self.room = None
        for call in ("take_room", "insert"):
            if call == until:
                break
            getattr(self, call)()

    def take_room(self):
        self.room = self.site.take_room(self.subject, self.selection.offered, self.selection.state)

    def insert(self):
        self.site.insert(self.subject, self.selection.offered, self.room, self.selection.state)

    def adopt(self):
        self.site.adopt(self.subject, self.selection.offered, self.room, self.selection.state)

    def leave(self):
        self.site.leave(self.room)

    def check(self):
        """The room is there, and can be dropped, or nothing of it is."""
        pool = self.site.pool
        pool.note_access(2)
        if self.room is not None and not self.room.hold.is_released:
            self.site.drop(self.room)
        check(pool)
        assert [hold.reason for hold in pool.block_pool.holds.list_holds()] == ["pinned"]
        assert not pool.holdings.barred
        assert not pool.holdings._barred_holds
        cached = set()
        for event in pool.block_pool.take_events():
            change = cached.difference if "Removed" in type(event).__name__ else cached.union
            cached = change((one, event.group_idx) for one in event.block_hashes)
        assert len(cached) == len(list(pool.block_pool.iter_cached_keys()))


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("call", ["take_room", "insert", "adopt", "leave"])
def test_an_interrupted_arrival_is_there_or_can_be_dropped(call, subject):
    tried, broken = interrupt_everywhere(
        lambda: Arrival(SUBJECTS[subject], call), lambda arrival: getattr(arrival, call)(), Arrival.check
    )
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"
