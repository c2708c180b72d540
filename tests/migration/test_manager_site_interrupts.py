"""Interrupted calls of a `PoolSite` over a manager leave a request at the source, in transit or gone."""

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
    """An arriving request, up to a given call; the target engine already has one of its blocks."""

    def __init__(self, until):
        source = MadeEngine()
        source.start("arriving", range(12))
        self.engine = MadeEngine()
        self.engine.start("running", [*range(4), 50, 51, 52, 53])
        self.site = self.engine.site
        self.selection = source.site.select(SUBJECT, False)
        self.reservation = None
        for call in ("reserve", "insert"):
            if call == until:
                break
            getattr(self, call)()

    def reserve(self):
        self.reservation = self.site.reserve(SUBJECT, self.selection.offered, self.selection.state)

    def insert(self):
        self.site.insert(self.reservation)

    def adopt(self):
        self.site.adopt(self.reservation)

    def leave(self):
        self.site.release_reservation(self.reservation)

    def check(self):
        self.engine.pool.get_new_blocks(0)
        if self.reservation is not None and not self.reservation.hold.is_released:
            self.site.release_reservation(self.reservation)
        invariants.check(self.engine.pool)
        check_references(self.engine.manager)
        assert not self.engine.pool.holds.list_holds()


@pytest.mark.parametrize("call", ["reserve", "insert", "adopt", "leave"])
def test_an_interrupted_arrival_completes_or_can_be_dropped(call):
    tried, broken = interrupt_everywhere(
        lambda: Arrival(call), lambda arrival: getattr(arrival, call)(), Arrival.check
    )
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


class Departure:
    """A departing request, up to a given call; another request of the source shares its first block."""

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

    def begin_again(self):
        request = self.engine.requests["leaving"]
        request.num_computed_tokens = 0
        assert self.engine.manager.allocate_slots(request, 3)

    def check(self):
        """Check that the request is in one place and that it can then leave or stay."""
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
        assert list(engine.manager.detached_requests) == site.list_frozen()


LEAVING = SequenceSubject("leaving")
DEPARTURES = {"freeze": False, "thaw": True, "release": True}


@pytest.mark.parametrize("call", DEPARTURES)
def test_an_interrupted_departure_keeps_one_owner(call):
    tried, broken = interrupt_everywhere(
        lambda: Departure(DEPARTURES[call]), lambda departure: getattr(departure, call)(), Departure.check
    )
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("call", DEPARTURES)
def test_an_interrupted_recovery_of_a_departure_keeps_one_owner(call):
    tried, broken = interrupt_twice_at_random(
        lambda: Departure(DEPARTURES[call]),
        lambda departure: getattr(departure, call)(),
        Departure.check,
        random.Random(call),
        40,
    )
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("call", ["reserve", "leave"])
def test_an_interrupted_recovery_leaves_a_droppable_arrival(call):
    def check(arrival):
        arrival.site.list_frozen()
        Arrival.check(arrival)

    tried, broken = interrupt_twice_at_random(
        lambda: Arrival(call), lambda arrival: getattr(arrival, call)(), check, random.Random(call), 40
    )
    assert tried > 0 or COMPILED
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


def test_old_blocks_of_a_restarted_request_are_freed():
    def make():
        departure = Departure(True)
        departure.begin_again()
        return departure

    def check(departure):
        if departure.site.list_frozen():
            departure.thaw()
        departure.check_balance()
        assert departure.engine.manager.get_block_ids("leaving")

    tried, broken = interrupt_everywhere(make, Departure.thaw, check)
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"
