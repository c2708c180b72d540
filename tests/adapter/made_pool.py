"""Helpers to make, draw and check small pools, with bytes that identify their origin."""

from collections import Counter
from types import SimpleNamespace

from kv_pool import BlockAllocationRequest, GPUKVPool
from kv_pool.adapter import invariants
from kv_pool.migration.pool_sequences import PoolSequences
from kv_pool.migration.pool_site import PoolSite
from kv_pool.storage import KVStorage
from kv_pool.storage.copy_cpu import copy_on_cpu


class CountingClock:
    """A clock that advances by one second per call."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


class BreakingCopy:
    """Copies blocks; fails after `num_good` moves, unless None, in the call after `num_good_calls` others."""

    num_good = None
    num_good_calls = 0

    def __call__(self, source, target, sources, targets):
        breaks = self.num_good is not None and self.num_good_calls == 0
        self.num_good_calls = max(0, self.num_good_calls - 1)
        end = self.num_good if breaks else None
        copy_on_cpu(source, target, sources[:end], targets[:end])
        if breaks:
            raise OSError("the device fell off the bus")


def make(total_blocks=10, **options):
    """Make a pool that takes the lowest empty ids and evicts no sequence, unless given options."""
    defaults = {"clock": CountingClock(), "placement": "oldest", "eviction_policy": None}
    return GPUKVPool(total_blocks, 4, **{**defaults, **options})


def take(pool, sequence_id, num_blocks, **options):
    return pool.allocate(BlockAllocationRequest(num_blocks, sequence_id, **options))


def make_site(pool, **options):
    """Make a pool as a site of migrations; `site.sequences.gpu_pool` is the pool."""
    return PoolSite(PoolSequences(pool), **options)


def make_storage(num_blocks=11, copy=None):
    return KVStorage.allocate(num_blocks, 4, 1, 1, 4, copy=copy)


def make_scattered(**options):
    """1 . 2 . 3 . 4 . 5 .  Sequences of one block each, with the block after each one free."""
    pool = make(**options)
    for sequence_id in range(1, 6):
        take(pool, sequence_id, 1)
        take(pool, 100, 1, contiguous="no")
    pool.free_sequence(100)
    return pool


def draw(pool):
    """Draw the holders: one character per block from 1 on; `.` free, `*` free and cached, `+` shared."""
    holders = {}
    for sequence_id in pool.list_sequences():
        for block_id in pool.blocks_of(sequence_id):
            holders[block_id] = "+" if block_id in holders else str(sequence_id % 10)
    cached = {block.block_id for block in pool.block_pool.blocks if block.block_hash is not None}
    return "".join(
        holders.get(block_id, "*" if block_id in cached else ".")
        for block_id in range(1, pool.total_blocks + 1)
    )


def check(pool, others=()):
    """Check all invariants, and that holders, references, pins and sequences agree.

    `others` are the references that belong neither to sequences nor to holds, one entry per reference.
    """
    invariants.check(pool, others)
    references = {}
    for sequence_id in pool.list_sequences():
        held = pool.blocks_of(sequence_id)
        assert held
        assert len(set(held)) == len(held)
        for block_id in held:
            references.setdefault(block_id, []).append(sequence_id)
    num_pinned = 0
    held = [
        block
        for hold in pool.block_pool.holds.list_holds()
        if hold.reason != "pinned"
        for block in hold.blocks
    ]
    num_others = Counter(block.block_id for block in [*others, *held])
    for block_id in range(1, pool.total_blocks + 1):
        info = pool.get_block_info(block_id)
        assert info.ref_count == len(references.get(block_id, [])) + num_others[block_id]
        assert sorted(info.sequence_ids) == sorted(references.get(block_id, []))
        assert info.sequence_id == (info.sequence_ids or [-1])[0]
        assert info.ref_count or not info.is_pinned
        num_pinned += info.is_pinned
    assert num_pinned == pool.num_pinned_blocks
    assert pool.get_free_blocks() == pool.total_blocks - len({*references, *num_others})
    assert len(pool.block_info) == len(references)


def fill(pool):
    """Write bytes that identify sequence and position to each block of a sequence; see `read`."""
    for sequence_id in pool.list_sequences():
        for position, block_id in enumerate(pool.blocks_of(sequence_id)):
            write(pool, block_id, 16 * sequence_id + position)


def view_block(pool, block_id):
    """Return a block's memory as numbers of 8 bytes."""
    [tensor] = pool.storage.tensors
    return tensor[block_id].view("uint64")


def write(pool, block_id, number):
    view_block(pool, block_id)[:] = number


def read(pool, sequence_id):
    """Return the numbers in a sequence's blocks."""
    return [read_block(pool, block_id) for block_id in pool.blocks_of(sequence_id)]


def read_block(pool, block_id):
    [number] = set(view_block(pool, block_id).ravel().tolist())
    return number


def state(pool):
    """Return all observable state, to compare it after a failure."""
    return SimpleNamespace(
        drawn=draw(pool),
        sequences={name: pool.blocks_of(name) for name in pool.list_sequences()},
        infos=[pool.get_block_info(block_id) for block_id in range(1, pool.total_blocks + 1)],
        num_pinned=pool.num_pinned_blocks,
        free=[block.block_id for block in pool.block_pool.free_block_queue.get_all_free_blocks()],
    )
