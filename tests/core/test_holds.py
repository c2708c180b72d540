"""Holds: references with a reason that keep the content of blocks and, unless movable, their ids."""

import pytest
from drawing import blocks, make_pool, state

from kv_pool import BlockPool, InvalidArgumentError, InvalidBlockError, InvalidTypeError
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
