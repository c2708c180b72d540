"""Random operations on a pool with a full cache: compaction evicts nothing, and finishes.

A slow model records what each sequence has written, and which content is cached under which hash, in eviction
order.
"""

import itertools
import random
from collections import Counter

import pytest
from adapter.made_pool import BreakingCopy, make, make_storage, read, read_block, take, write
from drawing import GROUP, hash_of

from kv_pool import CopyFailedError, OutOfBlocksError
from kv_pool.contiguous import invariants
from kv_pool.contiguous.defragmenter import Defragmenter
from kv_pool.storage import block_storage

NUM_BLOCKS, NUM_STEPS, RUN_LENGTH = 64, 150, 4


class FullCache:
    """A pool over memory; every allocated block is written and cached at once."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.copy = BreakingCopy()
        self.pool = make(
            NUM_BLOCKS,
            storage=make_storage(NUM_BLOCKS + 1, self.copy),
            run_length=RUN_LENGTH,
            on_moved=self.note_moved,
            enable_kv_cache_events=True,
        )
        self.numbers = itertools.count(1)
        self.held = {}  # sequence -> numbers in its blocks
        self.by_id = {}  # sequence -> ids, as an engine keeps them
        self.cached = []  # numbers in free blocks, next to be evicted first
        self.tally = Counter()
        self.acts = [self.compact]
        for sequence_id in range(NUM_BLOCKS):
            self.start(sequence_id, 1)
        for sequence_id in self.rng.sample(range(NUM_BLOCKS), NUM_BLOCKS):
            self.end(sequence_id)

    def start(self, sequence_id, num_blocks):
        self.write(sequence_id, take(self.pool, sequence_id, num_blocks, contiguous="no"))
        assert len(self.forget_evicted()) <= num_blocks

    def write(self, sequence_id, ids):
        """Write and cache the blocks of a new sequence."""
        self.by_id[sequence_id] = ids
        self.held[sequence_id] = numbers = [next(self.numbers) for _ in ids]
        for block_id, number in zip(ids, numbers, strict=True):
            write(self.pool, block_id, number)
        self.pool.cache_prefix(sequence_id, [hash_of(number) for number in numbers])

    def next_sequence(self):
        self.tally["started"] += 1
        return NUM_BLOCKS + self.tally["started"]

    def list_cached(self):
        """Return the numbers in free cached blocks, next to be evicted first."""
        free = self.pool.block_pool.free_block_queue.get_all_free_blocks()
        cached = {read_block(self.pool, block.block_id): block for block in free if block.block_hash}
        assert all(block.block_hash == hash_of(number) + GROUP for number, block in cached.items())
        return list(cached)

    def forget_evicted(self):
        """Drop and return the numbers that are in no free cached block any more."""
        left = self.list_cached()
        gone = [number for number in self.cached if number not in left]
        self.cached = [number for number in self.cached if number in left]
        return gone

    def end(self, sequence_id):
        self.pool.free_sequence(sequence_id)
        del self.by_id[sequence_id]
        self.cached += reversed(self.held.pop(sequence_id))

    def note_moved(self, relocation):
        remap = relocation.make_remap()
        for sequence_id, ids in self.by_id.items():
            self.by_id[sequence_id] = remap[ids].tolist()
        self.tally["moved"] += len(relocation.moves)

    def check(self):
        invariants.check(self.pool.block_pool)
        assert read_block(self.pool, 0) == 0
        for sequence_id, numbers in self.held.items():
            assert self.pool.blocks_of(sequence_id) == self.by_id[sequence_id]
            assert read(self.pool, sequence_id) == numbers
        assert self.list_cached() == self.cached

    def compact(self, breaks):
        """Run a step of a defragmenter, or a whole or limited compaction; its copies may fail."""
        pool = self.pool.block_pool
        pool.take_events()
        self.copy.num_good = self.rng.randrange(3) if breaks else None
        self.copy.num_good_calls = self.rng.randrange(8)
        goal = self.rng.choice([None, 0.1])
        try:
            self.pool.defragment(max_moves=self.rng.choice([None, 1, 2, 7]), goal=goal)
        except CopyFailedError:
            self.tally["broken off"] += 1
            lost = self.forget_evicted()
            assert len(lost) <= len(self.pool.storage.scratch_ids)
            self.tally["lost"] += len(lost)
            assert len(pool.take_events()) == len(lost)
        self.copy.num_good, self.copy.num_good_calls = None, 0
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
            number = self.next_sequence()
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
        self.start(self.next_sequence(), num_blocks)
        self.check()
        if self.rng.random() < 0.5:
            self.rng.choice(self.acts)(breaks and self.rng.random() < 0.4)
            self.check()


def live(seed, breaks, makes_runs=False):
    life = FullCache(seed)
    if makes_runs:
        life.acts += [life.take_a_run, life.shrink_and_grow]
    for _ in range(NUM_STEPS):
        life.step(breaks)
    return life


@pytest.fixture(autouse=True)
def _few_scratch_blocks(monkeypatch):
    """Copy a few exchanges at a time, so that there are several batches."""
    monkeypatch.setattr(block_storage, "_SCRATCH_BYTES", 4 * 64)


@pytest.mark.parametrize("makes_runs", [False, True], ids=["compactions", "runs and shrinks, too"])
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "breaking off"])
@pytest.mark.parametrize("seed", range(9))
def test_moves_in_a_full_cache_evict_only_what_they_must(seed, breaks, makes_runs):
    """Compactions evict nothing, failed ones few blocks, runs and shrinks the next ones."""
    life = live(seed, breaks, makes_runs)
    assert life.tally["moved"] > 50
    assert (life.tally["broken off"] > 3) == breaks
    if breaks and not makes_runs:
        assert life.tally["lost"] > 0
    if makes_runs:
        assert life.tally["runs made"] >= (1 if breaks else 3)
        assert life.tally["lost to runs and shrinking"] > 20
    if not breaks:
        assert life.pool.get_statistics().moved_blocks == life.tally["moved"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_moves", [2, 5, None])
def test_a_defragmenter_finishes_in_a_full_cache(seed, max_moves):
    life = live(seed, breaks=False)
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
