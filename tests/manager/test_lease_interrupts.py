"""Leases that a signal handler interrupts: each has one hold and its references; nothing else has any."""

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
    leases.leased = [
        leases.acquire(blocks(pool, 1, 4), 5.0, "one", LeaseKind.READ),
        leases.acquire(blocks(pool, 3), 5.0, "two", LeaseKind.WRITE),
    ]
    return leases


def expire(leases):
    leases.now = 6.0
    leases.expire()


CALLS = {
    "read": lambda leases: leases.acquire(blocks(leases.block_pool, 1, 2), 5.0, "one"),
    "written": lambda leases: leases.acquire(blocks(leases.block_pool, 5), 5.0, "two", LeaseKind.WRITE),
    "a read ends": lambda leases: leases.leased[0].release(),
    "extended": lambda leases: leases.leased[0].extend(9.0),
    "expired": expire,
    "a write ends": lambda leases: leases.leased[1].release(),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_lease_leaves_no_reference(name):
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


def test_an_interrupted_lease_leaves_the_holders_other_holds():
    def make_two():
        leases = make()
        others = BlockLeases(leases.block_pool, clock=lambda: 0.0)
        leases.other = others.acquire(blocks(leases.block_pool, 4), 5.0, "one")
        return leases

    def check(leases):
        assert not leases.other.hold.is_released
        leases.other.release()
        invariants.check(leases.block_pool)
        assert len(leases.block_pool.holds.list_holds()) == len(leases.list_leases())

    tried, broken = interrupt_everywhere(make_two, CALLS["read"], check)
    assert tried > 0
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"
