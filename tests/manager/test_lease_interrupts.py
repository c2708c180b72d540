"""Loans that a signal handler breaks off: a reference and a hold for each lease, and for nothing else."""

import pytest
from drawing import blocks, make_pool
from interrupting import interrupt_everywhere

from kv_pool.core import invariants
from kv_pool.manager.invariants import check_leases
from kv_pool.manager.leases import BlockLeases, LeaseKind

PICTURE = "free: 1* 2* | in use: 3 4* 5"


def make():
    pool = make_pool(PICTURE)
    leases = BlockLeases(pool, clock=lambda: leases.now)
    leases.now = 0.0
    leases.lent = [
        leases.lend(blocks(pool, 1, 4), 5.0, "one", LeaseKind.READ),
        leases.lend(blocks(pool, 3), 5.0, "two", LeaseKind.WRITE),
    ]
    return leases


def expire(leases):
    leases.now = 6.0
    leases.expire()


CALLS = {
    "read": lambda leases: leases.lend(blocks(leases.block_pool, 1, 2), 5.0, "one"),
    "written": lambda leases: leases.lend(blocks(leases.block_pool, 5), 5.0, "two", LeaseKind.WRITE),
    "a read ends": lambda leases: leases.lent[0].give_back(),
    "extended": lambda leases: leases.lent[0].extend(9.0),
    "expired": expire,
    "a write ends": lambda leases: leases.lent[1].give_back(),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_loan_leaves_no_reference_behind(name):
    def check(leases):
        pool = leases.block_pool
        invariants.check(pool)
        check_leases(leases)
        assert sum(block.ref_cnt for block in pool.blocks) == 3 + sum(
            len(lease.blocks) for lease in leases.list_leases()
        )
        assert len(pool.holds.list_holds()) == len(leases.list_leases())
        leases.expire()
        check_leases(leases)

    tried, broken = interrupt_everywhere(make, CALLS[name], check)
    assert not broken, f"{name}: {len(broken)} of {tried}: {broken[:3]}"


def test_an_interrupted_loan_leaves_the_hold_of_other_leases_with_the_same_holder():
    def make_two():
        leases = make()
        others = BlockLeases(leases.block_pool, clock=lambda: 0.0)
        leases.other = others.lend(blocks(leases.block_pool, 4), 5.0, "one")
        return leases

    def check(leases):
        assert not leases.other.hold.is_released
        leases.other.give_back()
        invariants.check(leases.block_pool)
        assert len(leases.block_pool.holds.list_holds()) == len(leases.list_leases())

    tried, broken = interrupt_everywhere(make_two, CALLS["read"], check)
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"
