import random

import pytest
from drawing import cache, ids, make_pool, state

from kv_pool import (
    BlockLeases,
    BlockPool,
    InvalidBlockError,
    LeaseKind,
    StaleLeaseError,
)
from kv_pool.contiguous import compaction
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants
from kv_pool.manager.invariants import check_leases
from kv_pool.manager.leases import LeaseState

READ, WRITE = LeaseKind.READ, LeaseKind.WRITE
SEEDS = range(150)


class Clock:
    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now


def make(picture):
    clock = Clock()
    pool = make_pool(picture)
    return pool, clock, BlockLeases(pool, clock)


def acquire(leases, block_ids, deadline=10, holder="worker", kind=READ):
    return leases.acquire(
        [leases.block_pool.blocks[block_id] for block_id in block_ids], deadline, holder, kind
    )


def snapshot(pool, leases):
    check_leases(leases)
    return state(pool), [(lease, repr(lease)) for lease in leases.list_leases()], leases.num_leased_blocks


COMPACTIONS = {
    "pack": lambda pool, copy: compaction.pack(pool, copy),
    "gather": lambda pool, copy: compaction.gather(pool, copy, run_length=4),
    "take_run": lambda pool, copy: compaction.take_run(pool, 9, copy, lambda relocation: None),
    "shrink": lambda pool, copy: compaction.shrink(pool, 4, copy),
}


@pytest.mark.parametrize("kind", list(LeaseKind))
@pytest.mark.parametrize("name", COMPACTIONS)
def test_compaction_moves_no_leased_block(name, kind):
    """The blocks' ids were reused while a network card still wrote to them."""
    pool = RunBlockPool(13, True, 4)
    leases = BlockLeases(pool, clock=lambda: 0.0)
    before, leased = pool.get_new_blocks(6), pool.get_new_blocks(3)
    lease = leases.acquire(leased, 30.0, "nic", kind)
    pool.free_blocks(before)
    copied = []
    if name == "shrink":
        with pytest.raises(
            InvalidBlockError, match=rf"block 9 is leased to nic \({kind.value}\): it cannot be"
        ):
            COMPACTIONS[name](pool, copied.extend)
    else:
        assert not COMPACTIONS[name](pool, copied.extend) or name == "gather"
    assert copied == []
    assert ids(leased) == [7, 8, 9]
    assert not {7, 8, 9} & set(ids(pool.get_new_blocks(8)))
    lease.release()
    assert pool.holds.list_holds() == []


def test_a_lease_ends_once():
    pool, _, leases = make("free: 1*")
    lease = acquire(leases, [1])
    lease.release()
    before = snapshot(pool, leases)
    with pytest.raises(StaleLeaseError, match=r"'worker', released\) is over"):
        lease.release()
    with pytest.raises(StaleLeaseError):
        lease.extend(20)
    assert snapshot(pool, leases) == before


def test_a_late_writer_is_quarantined_until_it_confirms():
    pool, clock, leases = make("free: 2 | in use: 1")
    lease = acquire(leases, [1], 5, kind=WRITE)
    pool.free_blocks([pool.blocks[1]])
    clock.now = 5
    assert leases.expire() == [lease]
    assert [one.state for one in leases.list_leases()] == [LeaseState.QUARANTINED]
    assert leases.expire() == []
    check_leases(leases)
    assert state(pool) == "free: 2 | in use: 1"
    with pytest.raises(StaleLeaseError, match="cannot be extended: its deadline has passed"):
        lease.extend(20)
    lease.release()
    assert leases.list_leases() == []
    assert state(pool) == "free: 1 2"


@pytest.mark.parametrize(
    ("block_ids", "kind", "message"),
    [
        ([0], READ, "block 0 is null"),
        ([1], READ, "free and has no content"),
        ([2, 2], READ, "twice"),
        ([6], READ, "writes it"),
        ([2], WRITE, "cached"),
        ([1], WRITE, "0 references"),
        ([4], WRITE, "2 references"),
        ([5, 3], WRITE, "and is cached"),
        ([6], WRITE, "writes it"),
    ],
)
def test_an_unsuitable_block_is_refused_and_nothing_changes(block_ids, kind, message):
    pool, _, leases = make("free: 1 2* | in use: 3* 4x2 5 6")
    acquire(leases, [6], holder="first", kind=WRITE)
    before = snapshot(pool, leases)
    with pytest.raises(InvalidBlockError, match=message):
        acquire(leases, block_ids, kind=kind)
    assert snapshot(pool, leases) == before


@pytest.mark.parametrize("seed", SEEDS)
def test_random_leases_leak_and_reuse_no_block(seed):
    """The model: a list of block ids per live lease and per holder; references are recounted each time."""
    chance = random.Random(seed)
    clock = Clock()
    pool = BlockPool(11, True, 4)
    leases = BlockLeases(pool, clock)
    held, live = [], {}
    cached = 0
    for _ in range(150):
        action = chance.choice(["take", "free", "read", "write", "back", "wait", "expire", "extend"])
        deadline = clock.now + chance.randint(1, 6)
        if action == "take" and pool.get_num_free_blocks():
            blocks = pool.get_new_blocks(chance.randint(1, min(3, pool.get_num_free_blocks())))
            leased = {block_id for lease in live for block_id in ids(lease.blocks)}
            assert not leased & set(ids(blocks))
            if chance.random() < 0.6:
                for block in blocks:
                    cached += 1
                    cache(pool, block, cached)
            held.append(blocks)
        elif action == "free" and held:
            pool.free_blocks(held.pop(chance.randrange(len(held))))
        elif action in ("read", "write"):
            blocks = chance.sample(pool.blocks[1:], chance.randint(1, 2))
            kind = READ if action == "read" else WRITE
            written = {b for lease in live if lease.kind is WRITE for b in lease.blocks}
            leased = {b for lease in live for b in lease.blocks}
            if kind is READ:
                fits = all((b.ref_cnt or b.block_hash) and b not in written for b in blocks)
            else:
                fits = all(b.ref_cnt == 1 and b.block_hash is None and b not in leased for b in blocks)
            if fits:
                live[leases.acquire(blocks, deadline, "worker", kind)] = deadline
            else:
                before = snapshot(pool, leases)
                with pytest.raises(InvalidBlockError):
                    leases.acquire(blocks, deadline, "worker", kind)
                assert snapshot(pool, leases) == before
        elif action == "back" and live:
            lease = chance.choice(list(live))
            lease.release()
            del live[lease]
        elif action == "wait":
            clock.now += chance.randint(1, 3)
        elif action == "extend" and live:
            lease = chance.choice(list(live))
            if live[lease] is None:
                with pytest.raises(StaleLeaseError):
                    lease.extend(deadline)
            else:
                lease.extend(deadline)
                live[lease] = deadline
        elif action == "expire":
            due = [lease for lease in live if live[lease] is not None and live[lease] <= clock.now]
            due.sort(key=lambda lease: live[lease])
            assert [lease.deadline for lease in leases.expire()] == [live[lease] for lease in due]
            for lease in due:
                live[lease] = None
                if lease.kind is READ:
                    del live[lease]
        check_leases(leases)
        invariants.check(pool)
        assert set(leases.list_leases()) == set(live)
        for lease, deadline in live.items():
            assert (lease.state is LeaseState.QUARANTINED) == (deadline is None)
        for block in pool.blocks[1:]:
            holders = sum(block in blocks for blocks in held)
            assert block.ref_cnt == holders + sum(block in lease.blocks for lease in live)
    for blocks in held:
        pool.free_blocks(blocks)
    for lease in live:
        lease.release()
    assert pool.get_num_free_blocks() == 10
