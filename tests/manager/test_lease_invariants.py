"""Each invariant of leases is broken by hand, and its check names it."""

import pytest
from damages import damages
from drawing import make_pool

from kv_pool import BlockLeases, CorruptedPoolError, LeaseKind
from kv_pool.core.deadlines import NEVER
from kv_pool.manager.invariants import check_leases


def make_leases():
    """A lease to read cached blocks, one to write, and one to write that is quarantined."""
    times = [0.0]
    pool = make_pool("free: 3 1* 2* | in use: 4* 5 6")
    leases = BlockLeases(pool, lambda: times[0])
    quarantined = leases.acquire([pool.blocks[6]], 10.0, "late worker", LeaseKind.WRITE)
    times[0] = 20.0
    leases.expire()
    read = leases.acquire([pool.blocks[1], pool.blocks[4]], 30.0, "worker")
    written = leases.acquire([pool.blocks[5]], 30.0, "worker", LeaseKind.WRITE)
    return leases, read, written, quarantined


def test_sound_leases_pass():
    leases, *listed = make_leases()
    assert [lease.state.value for lease in listed] == ["active", "active", "quarantined"]
    check_leases(leases)


def lease_another_block_than_is_held(leases, read, written, quarantined):
    read.blocks = read.blocks[:1]


def list_a_lease_under_the_hold_of_another(leases, read, written, quarantined):
    read.hold = written.hold


def quarantine_a_reader(leases, read, written, quarantined):
    quarantined.kind = LeaseKind.READ


def hold_without_a_deadline(leases, read, written, quarantined):
    read.hold.changes_at = NEVER


def lose_the_deadlines(leases, read, written, quarantined):
    leases.block_pool.holds.deadlines.entries.clear()


def hash_a_block_that_is_written(leases, read, written, quarantined):
    written.blocks[0].set_block_hash(b"x")


def read_a_block_that_is_written(leases, read, written, quarantined):
    hold = leases.block_pool.hold(list(read.blocks), "read by a test")
    hold._blocks[written.blocks[0]] = None
    read.blocks = (*read.blocks, written.blocks[0])
    read.hold._blocks[written.blocks[0]] = None


@damages(
    (lease_another_block_than_is_held, "L1"),
    (list_a_lease_under_the_hold_of_another, "L1"),
    (quarantine_a_reader, "L2"),
    (hold_without_a_deadline, "L2"),
    (lose_the_deadlines, "L2"),
    (hash_a_block_that_is_written, "L3"),
    (read_a_block_that_is_written, "L3"),
)
def test_each_broken_lease_invariant_is_named(damage, broken):
    made = make_leases()
    damage(*made)
    with pytest.raises(CorruptedPoolError, match=f"^{broken}: "):
        check_leases(made[0])
