"""Calls of a `PoolSite` and of `SourceTransfers` to interrupt: a request has one owner, and nothing leaks."""

from functools import partial

from interrupt_cases.case import Case, Subject
from migration.made_nodes import Clock, MadeEngine

from kv_pool.core import invariants
from kv_pool.manager.invariants import check_references
from kv_pool.migration.messages import AcknowledgeTransfer, CancelTransfer, PrepareTransfer, SequenceSubject
from kv_pool.migration.source import SourceTransfers

MOVING = SequenceSubject("moving")
TRANSFER = b"transfer" * 2


class Node(Subject):
    """An engine with a small pool, and a request that stays."""

    def __init__(self, **options):
        self.engine = MadeEngine(16, **options)
        self.engine.start("running", [*range(4), 50, 51, 52, 53])
        self.site = self.engine.site

    def is_interrupted(self):
        return self.engine.pool.is_changing

    def call_next(self):
        self.site.list_frozen()

    def repair(self):
        self.engine.manager.repair()

    def check_rest(self):
        """Check the pool, and that holds and frozen requests belong to the site's departures."""
        engine = self.engine
        invariants.check(engine.pool)
        check_references(engine.manager)
        engine.check_bytes("running")
        held = {
            block
            for name in engine.manager.list_request_ids()
            for block in engine.manager.get_table(name).blocks
        }
        held.update(engine.pool.holds.count_references())
        assert engine.pool.get_num_free_blocks() + len(held) == 15
        assert len(engine.pool.holds.list_holds()) == len(self.site.list_frozen())
        assert list(engine.manager.detached_requests) == self.site.list_frozen()
        assert list(engine.manager.detached_tables) == self.site.list_frozen()


class Arrival(Node):
    """An arriving request, up to a given call; the target has one of its blocks already."""

    def __init__(self, until):
        source = MadeEngine(16)
        source.start("moving", range(12))
        super().__init__()
        self.selection = source.site.select(MOVING, False)
        self.reservation = None
        for call in ("reserve", "insert"):
            if call == until:
                break
            getattr(self, call)()

    def reserve(self):
        self.reservation = self.site.reserve(MOVING, self.selection.offered, self.selection.state)

    def insert(self):
        self.site.insert(self.reservation)

    def adopt(self):
        self.site.adopt(self.reservation)

    def leave(self):
        self.site.release_reservation(self.reservation)

    def check(self, is_repaired):
        engine = self.engine
        if self.reservation is None:
            self.check_rest()
            self.reserve()
        if not engine.manager.holds_blocks("moving") and self.reservation.is_ended:
            self.check_rest()
            return
        self.adopt()  # again, if it was interrupted
        assert len(engine.manager.get_block_ids("moving")) == 3
        assert "moving" in engine.requests
        self.check_rest()
        engine.finish("moving")
        self.check_rest()


class Departure(Node):
    """A departing request, up to a given call; another request of the source shares its first block."""

    def __init__(self, is_frozen, is_restarted=False):
        super().__init__()
        self.engine.start("moving", range(14))
        if is_frozen:
            self.freeze()
        if is_restarted:
            request = self.engine.requests["moving"]
            request.num_computed_tokens = 0
            assert self.engine.manager.allocate_slots(request, 3)
        self.is_restarted = is_restarted

    def freeze(self):
        self.site.freeze(MOVING, self.site.select(MOVING, True).rows)

    def thaw(self):
        self.site.thaw(MOVING)

    def release(self):
        self.site.release(MOVING, "there")

    def check(self, is_repaired):
        engine, site = self.engine, self.site
        self.check_rest()
        is_frozen = site.list_frozen() == ["moving"]
        if not is_frozen and not engine.manager.holds_blocks("moving"):
            self.release()  # its blocks are free; the owner may not have been notified
        if "moving" in engine.moved_away:
            assert not is_frozen
            assert "moving" not in engine.requests
            assert engine.manager.holds_blocks("moving") == self.is_restarted
            return
        if self.is_restarted:
            self.thaw()
            self.check_rest()
            assert len(engine.manager.get_block_ids("moving")) == 1
            return
        if not is_frozen:
            self.freeze()
            self.check_rest()
        self.thaw()
        self.check_rest()
        engine.check_bytes("moving")
        self.freeze()
        self.release()
        self.check_rest()
        assert engine.moved_away == {"moving": "there"}


class Source(Node):
    """A source with a transfer, which the target acknowledges or whose lease expires."""

    def __init__(self, is_prepared):
        self.clock = Clock()
        super().__init__(clock=self.clock)
        self.engine.start("moving", range(14))
        self.source = SourceTransfers(self.site, "here", "here@1", 10.0, self.clock)
        if is_prepared:
            self.prepare()

    def prepare(self):
        self.source.prepare(PrepareTransfer(TRANSFER, MOVING, True, self.site.layout, "there"))

    def acknowledge(self):
        self.source.acknowledge(AcknowledgeTransfer(TRANSFER, "here@1", [1, 2, 3, 4]))

    def cancel(self):
        self.source.cancel(CancelTransfer(TRANSFER))

    def expire(self):
        self.clock.now = 11.0
        self.source.expire()

    def check(self, is_repaired):
        engine = self.engine
        is_leaving = any(one.outcome and one.outcome.new_ids for one in self.source.list_prepared())
        self.source.expire()  # completes an interrupted end long before the lease does
        assert not any(one.outcome for one in self.source.list_prepared())
        self.expire()
        self.site.leases.expire()
        self.check_rest()
        assert not self.source.list_prepared()
        assert not self.site.leases.list_leases()
        assert not self.site.list_frozen()
        if is_leaving or "moving" in engine.moved_away:
            assert "moving" not in engine.requests
            assert not engine.manager.holds_blocks("moving")
            self.acknowledge()  # the target gets the same answer again
        else:
            engine.check_bytes("moving")


CASES = [
    *[
        Case(f"arrival.{name}", partial(Arrival, name), getattr(Arrival, name))
        for name in ("reserve", "insert", "adopt", "leave")
    ],
    Case("departure.freeze", partial(Departure, False), Departure.freeze),
    Case("departure.thaw", partial(Departure, True), Departure.thaw),
    Case("departure.thaw of a restarted request", partial(Departure, True, True), Departure.thaw),
    Case("departure.release", partial(Departure, True), Departure.release),
    Case("departure.release of a restarted request", partial(Departure, True, True), Departure.release),
    Case("source.prepare", partial(Source, False), Source.prepare),
    *[
        Case(f"source.{name}", partial(Source, True), getattr(Source, name))
        for name in ("acknowledge", "cancel", "expire")
    ],
]
