"""Holds: references with a reason that keep the content of blocks and, unless movable, their ids."""

import random
from collections import Counter

import pytest
from drawing import blocks, make_pool, state

from kv_pool import BlockPool, InvalidArgumentError, InvalidBlockError, InvalidTypeError
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants
from kv_pool.core.deadlines import NEVER
from kv_pool.core.holds import HoldReport, HoldState

PICTURE = "free: 3 1* | in use: 2* 4 5"


class Clock:
    """A pool's clock, set by the test."""

    def __init__(self, now=10.0):
        self.now = now

    def __call__(self):
        return self.now


def make_timed_pool():
    clock = Clock()
    return make_pool(PICTURE, clock=clock), clock


def list_states(pool):
    """Return all state that a refused call could have changed."""
    return (
        state(pool),
        [(hold, hold.blocks, hold.until, hold.state) for hold in pool.holds.list_holds()],
        list(pool.holds.deadlines.entries),
    )


# ---- references and ids --------------------------------------------------------------------------


def test_a_held_block_keeps_its_id_until_the_hold_is_released():
    pool = make_pool(PICTURE)
    hold = pool.hold(blocks(pool, 4), "read by a network card")
    for pairs in ([(2, 1), (4, 3)], [(3, 4)]):
        with pytest.raises(
            InvalidBlockError, match="C3: block 4 is read by a network card: it cannot be moved until that"
        ):
            pool.swap_block_ids(pairs)
    assert [block.block_id for block in pool.blocks] == list(range(6))
    hold.release()
    pool.swap_block_ids([(4, 3)])
    assert state(pool) == "free: 4 1* | in use: 2* 3 5"


# ---- refusals ------------------------------------------------------------------------------------


def test_only_blocks_of_this_pool_with_content_can_be_held():
    pool, other = make_pool(PICTURE), BlockPool(4, True, 4)
    hold = pool.hold(blocks(pool, 5), "held")
    before = list_states(pool)
    for wrong, said in (
        (pool.blocks[3], "block 3 is free and has no content; it cannot be held as "),
        (other.blocks[1], "block 1 is not one of this pool; it cannot be held as "),
    ):
        with pytest.raises(InvalidBlockError, match=said + "read"):
            pool.hold([pool.blocks[4], wrong], "read")
        with pytest.raises(InvalidBlockError, match=said + "held"):
            hold.add([pool.blocks[4], wrong])
        assert list_states(pool) == before
    for call in (lambda: pool.hold([pool.blocks[4], 5], "read"), lambda: hold.add([pool.blocks[4], 5])):
        with pytest.raises(InvalidTypeError, match=r"blocks\[1\]"):
            call()
        assert list_states(pool) == before


def test_a_hold_can_be_released_only_once():
    pool, clock = make_timed_pool()
    with pool.hold(blocks(pool, 4), "copied") as hold:
        assert not hold.is_released
    with pool.hold(blocks(pool, 4), "copied", until=11) as expired:
        clock.now = 12
        pool.expire_holds()
    assert expired.state is HoldState.EXPIRED
    for ended in (hold, expired):
        before = list_states(pool)
        for call in (
            ended.release,
            lambda ended=ended: ended.add(blocks(pool, 5)),
            lambda ended=ended: ended.extend(20.0),
            lambda ended=ended: pool.holds.hand_over(ended),
        ):
            with pytest.raises(InvalidArgumentError, match=r"Hold\('copied', 0 blocks\) has already been"):
                call()
        ended.remove(blocks(pool, 4))
        assert list_states(pool) == before
    assert pool.holds.list_holds() == []


def test_a_deadline_that_has_passed_is_refused():
    pool, clock = make_timed_pool()
    hold = pool.hold(blocks(pool, 4), "sent", until=15)
    before = list_states(pool)
    for until in (10, 9.5, float("nan"), -1):
        with pytest.raises(InvalidArgumentError, match=r"cannot hold blocks until .*: it is 10\.0 now"):
            pool.hold(blocks(pool, 5), "sent", until=until)
        with pytest.raises(InvalidArgumentError, match="cannot be extended"):
            hold.extend(until)
        assert list_states(pool) == before
    with pytest.raises(InvalidTypeError, match="until"):
        hold.extend("later")
    assert list_states(pool) == before
    assert clock.now == 10


# ---- deadlines and quarantine ----------------------------------------------------------------------


def test_a_quarantined_hold_keeps_its_references():
    pool, clock = make_timed_pool()
    hold = pool.holds.open(blocks(pool, 4), "written by node b", until=11, is_quarantined_late=True)
    clock.now = 11
    assert pool.expire_holds() == [hold]
    assert (hold.state, hold.until, hold.is_released) == (HoldState.QUARANTINED, None, False)
    assert pool.expire_holds() == []
    assert pool.holds.num_overdue == 1
    with pytest.raises(InvalidArgumentError, match="cannot be extended"):
        hold.extend(50)
    assert pool.explain_holds(4) == [
        HoldReport("written by node b", 10, None, False, HoldState.QUARANTINED, True)
    ]
    assert pool.holds.list_immovable_ids() == [4]
    hold.release()
    assert (state(pool), hold.state) == (PICTURE, HoldState.RELEASED)


# ---- reports -------------------------------------------------------------------------------------


def test_the_pool_reports_the_holds_on_a_block():
    pool, clock = make_timed_pool()
    pool.hold(blocks(pool, 4, 2), "sent to node b", until=12)
    clock.now = 11
    pool.hold(blocks(pool, 4), "a frozen table", movable=True)
    assert pool.explain_holds(4) == [
        HoldReport("sent to node b", 10, 12, False, HoldState.OPEN, True),
        HoldReport("a frozen table", 11, None, True, HoldState.OPEN, True),
    ]
    assert pool.explain_holds(5) == pool.explain_holds(0) == []
    pool.unpin_blocks(blocks(pool, 5), print)
    assert pool.explain_holds(5) == [
        HoldReport("watched until its reuse", 11, None, False, HoldState.OPEN, False)
    ]
    for wrong in (-1, 6):
        with pytest.raises(InvalidBlockError, match=f"Invalid block_id {wrong}: this pool has blocks 0..5"):
            pool.explain_holds(wrong)


# ---- against a slow model ------------------------------------------------------------------------


class Model:
    """A pool, and its expected holds: the blocks and the deadline of each."""

    def __init__(self, seed, pool_type):
        self.draw = random.Random(seed)
        self.clock = Clock()
        self.pool = pool_type(self.draw.randrange(8, 24), True, 4, clock=self.clock)
        self.tables = []  # lists of references that no hold has
        self.held = {}  # hold -> its blocks, in order
        self.until = {}  # hold -> its deadline
        self.quarantined = set()
        self.watched = set()
        self.num_cached = 0

    def step(self):
        name = self.draw.choices(list(STEPS), list(STEPS.values()))[0]
        getattr(self, name)()
        self.check()

    def check(self):
        pool = self.pool
        invariants.check(pool)
        references = Counter(block for table in self.tables for block in table)
        references.update(block for held in self.held.values() for block in held)
        assert references == {block: block.ref_cnt for block in pool.blocks[1:] if block.ref_cnt}
        assert pool.holds.list_holds() == list(self.held)
        counts = Counter(block for held in self.held.values() for block in held)
        assert pool.holds.count_references() == counts
        fixed = [block.block_id for hold, held in self.held.items() if not hold.is_movable for block in held]
        watched = [block.block_id for block in self.watched]
        assert Counter(pool.holds.list_immovable_ids()) == Counter(fixed + watched)
        for hold, held in self.held.items():
            assert hold.blocks == held
            assert hold.until == (None if self.until[hold] == NEVER else self.until[hold])
            assert (hold.state is HoldState.QUARANTINED) == (hold in self.quarantined)
            assert not hold.is_released
        reasons = Counter()
        for hold, held in self.held.items():
            reasons[hold.reason] += len(held)
        assert pool.holds.count_by_reason() == reasons
        block = self.draw.choice(pool.blocks)
        expected = [hold.reason for hold, held in self.held.items() if block in held]
        expected += ["watched until its reuse"] * (block in self.watched)
        assert [report.reason for report in pool.explain_holds(block.block_id)] == expected

    def some_blocks(self):
        """Return blocks that can be held: referenced, or with content."""
        some = [block for block in self.pool.blocks if block.ref_cnt or block.block_hash or block.is_null]
        return self.draw.choices(some, k=self.draw.randrange(5))

    def some_hold(self):
        return self.draw.choice(list(self.held)) if self.held else None

    def some_time(self):
        return self.clock.now + self.draw.randrange(1, 9)

    def note(self, hold, blocks, until=NEVER):
        self.held[hold] = [block for block in dict.fromkeys(blocks) if not block.is_null]
        self.until[hold] = until

    def forget(self, hold):
        del self.until[hold]
        self.quarantined.discard(hold)
        return self.held.pop(hold)

    # ---- steps ---------------------------------------------------------------------------------------

    def take(self):
        count = self.draw.randrange(1, 5)
        if count <= self.pool.get_num_free_blocks():
            self.tables.append(self.pool.get_new_blocks(count))
            for block in self.tables[-1]:
                if self.draw.random() < 0.5:
                    self.num_cached += 1
                    self.pool._insert_block_hash(b"hash %d" % self.num_cached, block, 4)

    def free(self):
        if self.tables:
            self.pool.free_blocks(self.tables.pop(self.draw.randrange(len(self.tables))))

    def watch(self):
        if self.tables:
            table = self.tables.pop(self.draw.randrange(len(self.tables)))
            self.pool.unpin_blocks(table, self.watched.discard)
            self.watched.update(table)

    def hold(self):
        some, is_movable = self.some_blocks(), self.draw.random() < 0.3
        until = self.some_time() if self.draw.random() < 0.6 else None
        hold = self.pool.hold(some, f"reason {self.draw.randrange(5)}", movable=is_movable, until=until)
        self.note(hold, some, NEVER if until is None else until)

    def hold_for_writing(self):
        some, until = self.some_blocks(), self.some_time()
        self.note(self.pool.holds.open(some, "written", False, until, True), some, until)

    def hold_wrongly(self):
        """Try to hold a free block without content, which is refused and changes nothing."""
        empty = [block for block in self.pool.blocks[1:] if not block.ref_cnt and block.block_hash is None]
        if empty:
            before = state(self.pool)
            with pytest.raises(InvalidBlockError):
                self.pool.hold([*self.some_blocks(), self.draw.choice(empty)], "wrong")
            if self.held:
                with pytest.raises(InvalidBlockError):
                    self.some_hold().add([*self.some_blocks(), self.draw.choice(empty)])
            assert state(self.pool) == before

    def add(self):
        if self.held:
            hold, some = self.some_hold(), self.some_blocks()
            hold.add(some)
            self.note(hold, self.held[hold] + some, self.until[hold])

    def remove(self):
        if self.held:
            hold, some = self.some_hold(), self.draw.choices(self.pool.blocks, k=4)
            hold.remove(some)
            self.note(hold, [block for block in self.held[hold] if block not in some], self.until[hold])

    def release(self):
        if self.held:
            hold = self.some_hold()
            hold.release()
            self.forget(hold)
            assert hold.is_released

    def extend(self):
        if self.held:
            hold, until = self.some_hold(), self.some_time()
            if hold in self.quarantined:
                with pytest.raises(InvalidArgumentError):
                    hold.extend(until)
            else:
                hold.extend(until)
                self.until[hold] = until

    def expire(self):
        self.clock.now += self.draw.randrange(4)
        overdue = [hold for hold in self.held if self.until[hold] <= self.clock.now]
        deadlines = sorted(self.until[hold] for hold in overdue)
        expired = self.pool.expire_holds()
        assert set(expired) == set(overdue)
        assert [self.until[hold] for hold in expired] == deadlines
        for hold in expired:
            if hold.is_quarantined_late:
                self.quarantined.add(hold)
                self.until[hold] = NEVER
            else:
                assert hold.state is HoldState.EXPIRED
                self.forget(hold)

    def adopt(self):
        if self.tables:
            adopted = self.tables.pop()
            self.note(self.pool.holds.adopt(adopted, "adopted"), adopted)

    def hand_over(self):
        if self.held:
            hold = self.some_hold()
            table = self.pool.holds.hand_over(hold)
            assert table == self.forget(hold)
            self.tables.append(table)

    def swap(self):
        first, second = self.draw.sample(range(1, self.pool.num_gpu_blocks), 2)
        if {first, second}.isdisjoint(self.pool.holds.list_immovable_ids()):
            self.pool.swap_block_ids([(first, second)])
        else:
            before = self.pool.blocks
            with pytest.raises(InvalidBlockError, match="C3: "):
                self.pool.swap_block_ids([(first, second)])
            assert self.pool.blocks is before


STEPS = {
    "take": 6,
    "free": 3,
    "watch": 1,
    "hold": 6,
    "hold_for_writing": 2,
    "hold_wrongly": 1,
    "add": 3,
    "remove": 3,
    "release": 4,
    "extend": 2,
    "expire": 3,
    "adopt": 2,
    "hand_over": 2,
    "swap": 3,
}


@pytest.mark.parametrize("pool_type", [BlockPool, RunBlockPool])
@pytest.mark.parametrize("seed", range(20))
def test_random_holds_agree_with_a_slow_model(seed, pool_type):
    model = Model(seed, pool_type)
    for _ in range(250):
        model.step()
    while model.held:
        model.release()
    while model.tables:
        model.free()
    assert model.pool.get_num_free_blocks() == model.pool.num_gpu_blocks - 1
