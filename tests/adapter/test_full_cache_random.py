"""Random operations on a pool with a full cache: compaction evicts nothing, and finishes.

A slow model records what each sequence has written, and which content is cached under which hash, in eviction
order.
"""

import random
from collections import Counter

import numpy as np
import pytest
from adapter.made_pool import make, take
from adapter.owned_memory import MEMORIES, BreakingCopy

from kv_pool import CopyFailedError, OutOfBlocksError
from kv_pool.contiguous import invariants
from kv_pool.contiguous.defragmenter import Defragmenter
from kv_pool.storage import block_storage
from kv_pool.storage.copy_cpu import copy_on_cpu

NUM_BLOCKS, NUM_STEPS, RUN_LENGTH = 64, 150, 4


class LaterBreakingCopy(BreakingCopy):
    """Fails at the call after `num_good_calls` calls, unless that is None."""

    num_good_calls = None

    def __call__(self, source, target, sources, targets):
        if self.num_good_calls is not None and self.num_good_calls:
            self.num_good_calls -= 1
            copy_on_cpu(source, target, sources, targets)
        else:
            super().__call__(source, target, sources, targets)


class FullCache:
    """A pool over memory; every allocated block is written and cached at once."""

    def __init__(self, name, seed):
        self.rng = random.Random(f"{name} {seed}")
        self.noise = np.random.default_rng(self.rng.getrandbits(32))
        self.copy = LaterBreakingCopy()
        self.memory = MEMORIES[name](self.noise, NUM_BLOCKS + 1, self.copy)
        self.pool = make(
            NUM_BLOCKS, storage=self.memory.storage, run_length=RUN_LENGTH, on_moved=self.note_moved
        )
        self.pool.block_pool.enable_kv_cache_events = True
        self.written = {}  # hash -> bytes
        self.held = {}  # sequence -> hashes of its blocks
        self.by_id = {}  # sequence -> ids, as an engine keeps them
        self.cached = []  # hashes of free blocks, next to be evicted first
        self.tally = Counter()
        self.acts = [self.compact]
        self.null_block = self.memory.read_all()[0]
        for sequence_id in range(NUM_BLOCKS):
            self.start(sequence_id, 1)
        for sequence_id in self.rng.sample(range(NUM_BLOCKS), NUM_BLOCKS):
            self.end(sequence_id)

    def start(self, sequence_id, num_blocks):
        ids = take(self.pool, sequence_id, num_blocks, contiguous="no")
        self.write(sequence_id, ids)
        assert len(self.forget_evicted()) <= num_blocks

    def write(self, sequence_id, ids):
        """Write and cache the blocks of a new sequence."""
        hashes = []
        for block_id in ids:
            hashes.append(b"hash %d" % len(self.written))
            self.written[hashes[-1]] = self.noise.bytes(self.memory.places.shape[1])
            self.memory.write(block_id, self.written[hashes[-1]])
        self.pool.cache_prefix(sequence_id, hashes)
        self.held[sequence_id] = hashes
        self.by_id[sequence_id] = ids

    def next_number(self):
        self.tally["started"] += 1
        return NUM_BLOCKS + self.tally["started"]

    def forget_evicted(self):
        """Drop and return the hashes that no free block has any more."""
        names = {
            block.block_hash[:-4]
            for block in self.pool.block_pool.free_block_queue.get_all_free_blocks()
            if block.block_hash is not None
        }
        gone = [name for name in self.cached if name not in names]
        self.cached = [name for name in self.cached if name in names]
        return gone

    def end(self, sequence_id):
        hashes = self.held.pop(sequence_id)
        self.pool.free_sequence(sequence_id)
        del self.by_id[sequence_id]
        self.cached += reversed(hashes)

    def note_moved(self, relocation):
        remap = relocation.make_remap()
        for sequence_id, ids in self.by_id.items():
            self.by_id[sequence_id] = remap[ids].tolist()
        self.tally["moved"] += len(relocation.moves)

    def check(self):
        pool = self.pool.block_pool
        invariants.check(pool)
        found = self.memory.read_all()
        assert found[0] == self.null_block
        for sequence_id, hashes in self.held.items():
            ids = self.pool.blocks_of(sequence_id)
            assert ids == self.by_id[sequence_id]
            assert [found[block_id] for block_id in ids] == [self.written[name] for name in hashes]
        free = pool.free_block_queue.get_all_free_blocks()
        names = [block.block_hash[:-4] for block in free if block.block_hash is not None]
        assert names == self.cached
        assert all(
            found[block.block_id] == self.written[block.block_hash[:-4]]
            for block in free
            if block.block_hash is not None
        )

    def compact(self, breaks):
        """Run a step of a defragmenter, or a whole or limited compaction; its copies may fail."""
        pool = self.pool.block_pool
        pool.take_events()
        self.copy.num_good = self.rng.randrange(3) if breaks else None
        self.copy.num_good_calls = self.rng.randrange(8) if breaks else None
        goal = self.rng.choice([None, 0.1])
        try:
            self.pool.defragment(max_moves=self.rng.choice([None, 1, 2, 7]), goal=goal)
        except CopyFailedError:
            self.tally["broken off"] += 1
            lost = self.forget_evicted()
            assert len(lost) <= len(self.memory.storage.scratch_ids)
            self.tally["lost"] += len(lost)
            assert len(pool.take_events()) == len(lost)
        self.copy.num_good = self.copy.num_good_calls = None
        assert pool.take_events() == []

    def count_empty(self):
        """Check blocks whose content a failed copy has lost; none of them is held."""
        free = self.pool.block_pool.free_block_queue.get_all_free_blocks()
        return sum(block.block_hash is None for block in free)

    def check_lost(self, before, num_blocks, num_empty):
        """Check that taking `num_blocks` evicted only the next blocks in eviction order."""
        num_lost = max(0, num_blocks - num_empty)
        assert before == before[:num_lost] + self.cached
        self.tally["lost to runs and shrinking"] += num_lost

    def take_a_run(self, breaks):
        """Allocate consecutive ids, which may take moves, but no more than needed."""
        num_blocks = self.rng.randint(2, 12)
        if num_blocks > self.pool.get_free_blocks():
            return
        before, num_empty, num_moved = list(self.cached), self.count_empty(), self.tally["moved"]
        self.copy.num_good = self.rng.randrange(3) if breaks else None
        try:
            number = self.next_number()
            ids = take(self.pool, number, num_blocks, contiguous="require")
        except CopyFailedError:
            self.tally["broken off"] += 1
            assert len(self.forget_evicted()) <= num_blocks
        else:
            assert ids == list(range(ids[0], ids[0] + num_blocks))
            self.forget_evicted()
            if self.tally["moved"] > num_moved:  # a free run is taken without moves
                self.tally["runs made"] += 1
                self.check_lost(before, num_blocks, num_empty)
            self.write(number, ids)
        self.copy.num_good = None

    def shrink_and_grow(self, breaks):
        num_blocks = self.rng.randint(0, NUM_BLOCKS // 4)
        if num_blocks > self.pool.get_free_blocks():
            with pytest.raises(OutOfBlocksError):
                self.pool.shrink(num_blocks)
            return
        before, num_empty = list(self.cached), self.count_empty()
        self.copy.num_good = self.rng.randrange(3) if breaks else None
        try:
            self.pool.shrink(num_blocks)
        except CopyFailedError:
            self.tally["broken off"] += 1
            assert len(self.forget_evicted()) <= num_blocks
        else:
            self.forget_evicted()
            self.check_lost(before, num_blocks, num_empty)
            self.check()
            self.pool.grow(num_blocks)
        self.copy.num_good = None

    def step(self, breaks):
        wanted = int(NUM_BLOCKS * 0.9)
        num_blocks = self.rng.randint(1, 6)
        while self.held and NUM_BLOCKS - self.pool.get_free_blocks() + num_blocks > wanted:
            self.end(self.rng.choice(list(self.held)))
        self.start(self.next_number(), num_blocks)
        self.check()
        if self.rng.random() < 0.5:
            self.rng.choice(self.acts)(breaks and self.rng.random() < 0.4)
            self.check()


def live(name, seed, breaks, makes_runs=False):
    life = FullCache(name, seed)
    if makes_runs:
        life.acts += [life.take_a_run, life.shrink_and_grow]
    for _ in range(NUM_STEPS):
        life.step(breaks)
    return life


@pytest.fixture(autouse=True)
def _few_scratch_blocks(monkeypatch):
    """Copy a few exchanges at a time, so that there are several batches."""
    monkeypatch.setattr(block_storage, "_SCRATCH_BYTES", 2_000)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed{seed}")
@pytest.mark.parametrize("name", ["NHD", "FlashAttention", "state"])
def test_a_compaction_of_a_full_cache_loses_nothing(name, seed):
    life = live(name, seed, breaks=False)
    assert life.tally["moved"] > 50
    assert life.pool.get_statistics().moved_blocks == life.tally["moved"]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed{seed}")
@pytest.mark.parametrize("name", ["NHD", "block outermost"])
def test_failed_exchanges_lose_no_block_in_use(name, seed):
    life = live(name, seed, breaks=True)
    assert life.tally["broken off"] > 3
    assert life.tally["lost"] > 0


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "breaking off"])
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed{seed}")
def test_a_run_or_a_shrink_evicts_only_the_next_blocks(seed, breaks):
    life = live("NHD", seed, breaks, makes_runs=True)
    assert life.tally["runs made"] >= (1 if breaks else 3)
    assert life.tally["lost to runs and shrinking"] > 20
    assert (life.tally["broken off"] > 3) == breaks


@pytest.mark.parametrize("seed", range(3), ids=lambda seed: f"seed{seed}")
@pytest.mark.parametrize("max_moves", [2, 5, None])
def test_a_defragmenter_finishes_in_a_full_cache(seed, max_moves):
    life = live("NHD", seed, breaks=False)
    evicted = life.pool.block_pool.num_evictions
    for goal in (0.05, 0.0):
        defragmenter = Defragmenter(life.pool, threshold=goal, interval_s=0, max_moves=max_moves)
        for _ in range(200):
            if not defragmenter.step():
                break
        else:
            pytest.fail(f"moves for ever: {defragmenter.num_moves} so far")
        assert [defragmenter.step() for _ in range(3)] == [0, 0, 0]
    life.check()
    assert life.pool.block_pool.num_evictions == evicted
    life.pool.defragment()
    assert life.pool.defragment() == 0
    assert life.pool.block_pool.list_free_runs() == [life.pool.get_free_blocks()]
