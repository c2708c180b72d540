"""Calls of a `ManagerSite` that a signal handler breaks off: what arrives is there, or can be dropped."""

import pytest
from interrupting import interrupt_everywhere
from migration.made_nodes import MadeEngine

from kv_pool.core import invariants
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
        self.site.insert(SUBJECT, self.selection.offered, self.room, self.selection.state)

    def adopt(self):
        self.site.adopt(SUBJECT, self.selection.offered, self.room, self.selection.state)

    def leave(self):
        self.site.leave(self.room)

    def check(self):
        self.engine.pool.get_new_blocks(0)
        if self.room is not None and not self.room.hold.is_released:
            self.site.drop(self.room)
        invariants.check(self.engine.pool)
        check_references(self.engine.manager)
        assert not self.engine.pool.holds.list_holds()
        assert not self.site._rooms


@pytest.mark.parametrize("call", ["take_room", "insert", "adopt", "leave"])
def test_an_interrupted_arrival_is_there_or_can_be_dropped(call):
    tried, broken = interrupt_everywhere(
        lambda: Arrival(call), lambda arrival: getattr(arrival, call)(), Arrival.check
    )
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"
