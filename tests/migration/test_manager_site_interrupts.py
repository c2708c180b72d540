"""Calls of a `PoolSite` over a manager, broken off: a request is here, on its way, or gone."""

import random

import pytest
from interrupting import interrupt_everywhere, interrupt_twice_at_random
from migration.made_nodes import MadeEngine

from kv_pool.core import invariants
from kv_pool.core.mode import COMPILED
from kv_pool.manager.invariants import check_references
from kv_pool.migration.subjects import SequenceSubject

SUBJECT = SequenceSubject("arriving")


class Arrival:
    """A request on its way to an engine that has one of its blocks, as far as before a call."""

    def __init__(self, until):
        source = MadeEngine()
        source.start("arriving", range(12))
        self.engine = MadeEngine()
        self.engine.start("running", [*range(4), 50, 51, 52, 53])
        self.site = self.engine.site
        self.selection = source.site.select(SUBJECT, False)
        self.room = None
        for call in ("take_room", "insert"):
            if call == until:
                break
            getattr(self, call)()

    def take_room(self):
        self.room = self.site.take_room(SUBJECT, self.selection.offered, self.selection.state)

    def insert(self):
        self.site.insert(self.room)

    def adopt(self):
        self.site.adopt(self.room)

    def leave(self):
        self.site.leave(self.room)

    def check(self):
        self.engine.pool.get_new_blocks(0)
        if self.room is not None and not self.room.hold.is_released:
            self.site.leave(self.room)
        invariants.check(self.engine.pool)
        check_references(self.engine.manager)
        assert not self.engine.pool.holds.list_holds()


@pytest.mark.parametrize("call", ["take_room", "insert", "adopt", "leave"])
def test_an_interrupted_arrival_is_there_or_can_be_dropped(call):
    tried, broken = interrupt_everywhere(
        lambda: Arrival(call), lambda arrival: getattr(arrival, call)(), Arrival.check
    )
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


class Departure:
    """A request on its way from an engine where another one has its first block, as far as before a call."""

    def __init__(self, is_frozen, **options):
        self.engine = MadeEngine(**options)
        self.engine.start("leaving", range(14))
        self.engine.start("running", [*range(4), 50, 51, 52, 53])
        self.site = self.engine.site
        self.selection = self.site.select(LEAVING, True)
        if is_frozen:
            self.freeze()

    def freeze(self):
        self.site.freeze(LEAVING)

    def thaw(self):
        self.site.thaw(LEAVING)

    def release(self):
        self.site.release(LEAVING, "there")

    def begin_anew(self):
        request = self.engine.requests["leaving"]
        request.num_computed_tokens = 0
        assert self.engine.manager.allocate_slots(request, 3)

    def check(self):
        """The request is in one place; whether it is to leave then or to stay, it can."""
        engine, site = self.engine, self.site
        is_frozen = site.list_frozen() == ["leaving"]
        is_here = engine.manager.holds_blocks("leaving")
        self.check_balance()
        assert "leaving" in engine.moved_away or is_frozen or is_here
        if "leaving" in engine.moved_away:
            assert not is_frozen
            assert not is_here
            assert "leaving" not in engine.requests
            return
        if not is_frozen:
            self.freeze()
            self.check_balance()
        self.thaw()
        self.check_balance()
        engine.check_bytes("leaving")
        self.freeze()
        self.release()
        self.check_balance()

    def check_balance(self):
        engine, site = self.engine, self.site
        invariants.check(engine.pool)
        check_references(engine.manager)
        held = {
            block
            for name in engine.manager.list_request_ids()
            for block in engine.manager.get_table(name).blocks
        }
        held.update(engine.pool.holds.count_references())
        assert engine.pool.get_num_free_blocks() + len(held) == 31
        assert len(engine.pool.holds.list_holds()) == len(site.list_frozen())
        assert list(engine.manager.taken_out) == site.list_frozen()


LEAVING = SequenceSubject("leaving")
DEPARTURES = {"freeze": False, "thaw": True, "release": True}


@pytest.mark.parametrize("call", DEPARTURES)
def test_an_interrupted_departure_leaves_the_request_in_one_place(call):
    tried, broken = interrupt_everywhere(
        lambda: Departure(DEPARTURES[call]), lambda departure: getattr(departure, call)(), Departure.check
    )
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("call", DEPARTURES)
def test_an_interrupt_in_the_recovery_leaves_the_request_in_one_place(call):
    tried, broken = interrupt_twice_at_random(
        lambda: Departure(DEPARTURES[call]),
        lambda departure: getattr(departure, call)(),
        Departure.check,
        random.Random(call),
        40,
    )
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("call", ["take_room", "leave"])
def test_an_interrupt_in_the_recovery_leaves_an_arrival_that_can_be_dropped(call):
    def check(arrival):
        arrival.site.list_frozen()
        Arrival.check(arrival)

    tried, broken = interrupt_twice_at_random(
        lambda: Arrival(call), lambda arrival: getattr(arrival, call)(), check, random.Random(call), 40
    )
    assert tried > 0 or COMPILED
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


def test_a_request_that_began_anew_has_its_old_blocks_freed_whatever_interrupts_it():
    def make():
        departure = Departure(True)
        departure.begin_anew()
        return departure

    def check(departure):
        if departure.site.list_frozen():
            departure.thaw()
        departure.check_balance()
        assert departure.engine.manager.get_block_ids("leaving")

    tried, broken = interrupt_everywhere(make, Departure.thaw, check)
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"
