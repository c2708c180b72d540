"""Calls about holds that a signal handler interrupts: no reference is lost, and none lacks a hold."""

import random
from collections import Counter

import pytest
from core.banded_pool import ByHash
from core.banded_pool import check as check_pool
from drawing import blocks, make_pool
from interrupting import interrupt_everywhere, interrupt_twice_at_random

from kv_pool import BlockPool
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.holds import HoldState
from kv_pool.core.mode import COMPILED

PICTURE = "free: 3 4 1* 2* 7* | in use: 5 6*x2 8* 9"


RESULTS = [[("new", 3)], [("new", 0)]]
"""The holds, as reasons and numbers of blocks, that calls return whole."""


class Bench:
    """A pool with holds, and the references and holds that the callers know of."""

    def __init__(self, kind):
        self.now = 10.0
        pool_type = RunBlockPool if kind.startswith("runs") else BlockPool
        self.pool = make_pool(PICTURE, pool_type, clock=lambda: self.now)
        if pool_type is RunBlockPool:
            self.pool.rebuild_index()
        if kind.endswith("bands"):
            policy = ByHash(self.pool)
            policy.bands = {block.block_hash: 3 for block in self.pool.blocks if block.block_hash}
            self.pool.open_bands(policy)
        self.table = blocks(self.pool, 5, 6, 6, 8, 9)  # references of the caller
        self.known = []  # holds of the caller
        self.first = self.pool.hold(blocks(self.pool, 5, 1, 8), "first", until=20)
        self.second = self.pool.holds.open(blocks(self.pool, 8, 2), "second", False, 15.0, True)
        self.third = self.pool.hold(blocks(self.pool, 8, 1, 9), "third", movable=True, until=16)
        self.known += [self.first, self.second, self.third]

    def check(self):
        """After the next call about holds, which completes what was interrupted, all references are owned."""
        pool = self.pool
        with pool.hold(blocks(pool, 6), "another"):
            pass
        pool.get_new_blocks(0)  # the index of a pool with runs may be stale
        check_pool(pool)
        new = [hold for hold in pool.holds.list_holds() if hold not in self.known]
        # An interrupt between the return of compiled code and its caller loses the result;
        # callers that must not lose it pass `onto`.
        assert not new or (COMPILED and [(hold.reason, len(hold.blocks)) for hold in new] in RESULTS)
        self.known += new
        references = Counter(self.table)
        for hold in self.known:
            assert hold.is_released == (hold.state in (HoldState.RELEASED, HoldState.EXPIRED))
            assert not (hold.is_released and hold.blocks)
            references.update(hold.blocks)
        assert references == {block: block.ref_cnt for block in pool.blocks[1:] if block.ref_cnt}
        for hold in self.known:
            if not hold.is_released:
                hold.release()
        pool.free_blocks(self.table)
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def check_deadlines(self):
        """Also check that each open hold with a deadline expires at it."""
        open_holds = [hold for hold in self.known if hold.until is not None]
        deadlines = sorted(hold.until for hold in open_holds)
        for hold in open_holds:
            assert hold.until in (15, 16, 17, 20, 30)
        for deadline in deadlines:
            self.now = deadline - 0.5
            assert self.pool.expire_holds() == []
            self.now = deadline
            assert len(self.pool.expire_holds()) == 1
        self.check()


def expire_all(bench):
    bench.now = 25.0
    bench.pool.expire_holds()


# A function instead of a lambda: an interrupt after the end of a lambda would lose its result.
def hold_three(bench):
    bench.pool.hold(blocks(bench.pool, 9, 1, 7), "new", until=30)


def hold_nothing(bench):
    bench.pool.hold([], "new")


def hold_for_a_list(bench):
    bench.pool.holds.open(blocks(bench.pool, 9, 1, 7), "new", onto=bench.known)


CALLS = {
    "hold": hold_three,
    "hold nothing": hold_nothing,
    "hold, onto": hold_for_a_list,
    "add": lambda bench: bench.first.add(blocks(bench.pool, 7, 9, 6, 2)),
    "remove": lambda bench: bench.first.remove(blocks(bench.pool, 1, 8, 2)),
    "release": lambda bench: bench.first.release(),
    "extend": lambda bench: bench.first.extend(17),
    "expire": expire_all,
    "adopt": lambda bench: bench.pool.holds.adopt(bench.distinct, "adopted", bench.known),
    "hand over": lambda bench: bench.pool.holds.hand_over(bench.third, bench.table),
}
KINDS = ["plain", "runs", "plain, bands", "runs, bands"]


def make(kind):
    """Return a bench, with references to distinct blocks in a separate list for the call that needs them."""
    bench = Bench(kind)
    bench.distinct = [bench.table.pop(), bench.table.pop()]
    return bench


def check(bench):
    bench.table += bench.distinct
    bench.check_deadlines()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_neither_loses_nor_leaks_references(name, kind):
    tried, broken = interrupt_everywhere(lambda: make(kind), CALLS[name], check)
    assert not broken, f"{name}, {kind}: {len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_undo_keeps_all_references(name, kind):
    tried, broken = interrupt_twice_at_random(
        lambda: make(kind), CALLS[name], check, random.Random(f"{name}, {kind}"), 60
    )
    assert not broken, f"{name}, {kind}: {len(broken)} of {tried}: {broken[:3]}"
