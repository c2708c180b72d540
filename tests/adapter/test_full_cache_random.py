"""Random lives of a pool whose cache is always full: compaction evicts nothing, and comes to rest.

Held against a slow model: what each sequence has written, and which content is cached under which hash, next
to be evicted first.
"""

import random
from collections import Counter

import numpy as np
import pytest
from adapter.made_pool import make, take
from adapter.owned_memory import MEMORIES, BreakingCopy

from kv_pool import CopyFailedError
from kv_pool.contiguous import invariants
from kv_pool.contiguous.defragmenter import Defragmenter
from kv_pool.storage import block_storage
from kv_pool.storage.copy_cpu import copy_on_cpu

NUM_BLOCKS, NUM_STEPS, RUN_LENGTH = 64, 150, 4


class LaterBreakingCopy(BreakingCopy):
    """Breaks off at the call after `num_good_calls` of them, if that is not None."""

    num_good_calls = None

    def __call__(self, source, target, sources, targets):
        if self.num_good_calls is not None and self.num_good_calls:
            self.num_good_calls -= 1
            copy_on_cpu(source, target, sources, targets)
        else:
            super().__call__(source, target, sources, targets)


class FullCache:
    """A pool over memory. Every block that a sequence takes is written and cached at once."""

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
        self.null_block = self.memory.read_all()[0]
        for sequence_id in range(NUM_BLOCKS):
            self.start(sequence_id, 1)
        for sequence_id in self.rng.sample(range(NUM_BLOCKS), NUM_BLOCKS):
            self.end(sequence_id)

    def start(self, sequence_id, num_blocks):
        ids = take(self.pool, sequence_id, num_blocks, contiguous="no")
        hashes = []
        for block_id in ids:
            hashes.append(b"hash %d" % len(self.written))
            self.written[hashes[-1]] = self.noise.bytes(self.memory.places.shape[1])
            self.memory.write(block_id, self.written[hashes[-1]])
        self.pool.cache_prefix(sequence_id, hashes)
        self.held[sequence_id] = hashes
        self.by_id[sequence_id] = ids
        assert len(self.forget_evicted()) <= num_blocks

    def forget_evicted(self):
        """Drop the hashes that no free block has any more; return them."""
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
        """A step of a defragmenter, a whole compaction, or a bounded one; its copies may break off."""
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

    def step(self, breaks):
        wanted = int(NUM_BLOCKS * 0.9)
        number = NUM_BLOCKS + self.tally["started"]
        num_blocks = self.rng.randint(1, 6)
        while self.held and NUM_BLOCKS - self.pool.get_free_blocks() + num_blocks > wanted:
            self.end(self.rng.choice(list(self.held)))
        self.start(number, num_blocks)
        self.tally["started"] += 1
        self.check()
        if self.rng.random() < 0.5:
            self.compact(breaks and self.rng.random() < 0.4)
            self.check()


def live(name, seed, breaks):
    life = FullCache(name, seed)
    for _ in range(NUM_STEPS):
        life.step(breaks)
    return life


@pytest.fixture(autouse=True)
def _few_scratch_blocks(monkeypatch):
    """A few exchanges at a time, so that there are several batches."""
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
def test_exchanges_that_break_off_lose_no_block_in_use(name, seed):
    life = live(name, seed, breaks=True)
    assert life.tally["broken off"] > 3
    assert life.tally["lost"] > 0


@pytest.mark.parametrize("seed", range(3), ids=lambda seed: f"seed{seed}")
@pytest.mark.parametrize("max_moves", [2, 5, None])
def test_a_defragmenter_comes_to_rest_in_a_full_cache(seed, max_moves):
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
