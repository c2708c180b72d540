"""Random calls on a pool and on a slow model of who owns which content, compared after each step.

Blocks are pinned, shared, retained, cached, cached twice, in flight; copies fail; the pool changes its size.
"""

import itertools
import random
from collections import Counter

import pytest
from adapter.made_pool import BreakingCopy, check, make, make_storage, read_block, take, write
from drawing import hash_of

from kv_pool import (
    CopyFailedError,
    InvalidBlockError,
    LRUEviction,
    OutOfBlocksError,
    PinLimitError,
    PinnedBlockError,
    PoolExhaustedError,
)
from kv_pool.contiguous import invariants
from kv_pool.contiguous.run_index import PLACEMENTS
from kv_pool.core.eviction_order import DEFAULT_BAND
from kv_pool.core.kv_events import BlockRemoved
from kv_pool.manager.retention.claims import find_band

NUM_BLOCKS, NUM_STEPS, NUM_FAMILIES = 40, 250, 3
MAX_PINNED, MAX_IN_FLIGHT, MAX_WAITED_FOR = 6, 3, 4
STRENGTHS = (0, 65, 95)
"""The strengths of directives for blocks of sequences of priority 0, 1, 2; 0 for no directive."""


class Life:
    """A pool, and the owners of its contents; a content is a number, never written twice."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.copy = BreakingCopy()
        self.is_notified = rng.random() < 0.7
        self.pool = make(
            NUM_BLOCKS,
            storage=make_storage(NUM_BLOCKS + 1, self.copy),
            run_length=rng.choice([1, 3, 4, 16]),
            max_pinned_blocks=MAX_PINNED,
            reserved_blocks=rng.choice([0, 3]),
            eviction_policy=rng.choice([None, LRUEviction()]),
            on_evicted=lambda sequence_id, _: self.evicted.append(sequence_id),
            on_moved=self.note_moved if self.is_notified else None,
            placement=rng.choice(PLACEMENTS),
            enable_kv_cache_events=True,
        )
        self.evicted = []
        self.numbers = itertools.count(1)
        self.held = {}  # sequence -> numbers of its blocks
        self.family = {}  # sequence -> the sequence whose prefix it shares
        self.priorities = {}  # sequence -> the highest of its requests
        self.keys = {}  # number -> the hash under which it was cached
        self.worth = {}  # number -> the highest strength of sequences that released it
        self.pins = {}  # number -> (id, the sequences that pinned it, None for no name)
        self.in_flight = {}  # block taken behind the pool's back -> (id, number)
        self.holds = {}  # the holds on these
        self.waited_for = {}  # watched block -> (id, number)
        self.by_id = {}  # sequence -> ids, kept up to date by relocations only
        self.num_sequences = 0
        self.tally = Counter()

    # ---- checks ------------------------------------------------------------------------------

    def check(self):
        """Check that every owner finds its content, and that fixed blocks have not moved."""
        pool = self.pool
        check(pool, list(self.in_flight))
        invariants.check(pool.block_pool)
        rate = pool.block_pool.track_fragmentation_rate(pool.run_length)
        assert rate == pytest.approx(pool.get_fragmentation_rate())
        found = self.read_all()
        assert found[0] == 0
        assert sorted(pool.list_sequences()) == sorted(self.held)
        for sequence_id, numbers in self.held.items():
            ids = pool.blocks_of(sequence_id)
            assert ids == self.by_id[sequence_id], "C8: told otherwise"
            assert [found[block_id] for block_id in ids] == numbers, "C4"
        for number, (block_id, _) in self.pins.items():
            assert found[block_id] == number, "C3: a pinned block has moved"
        assert pool.num_pinned_blocks == len(self.pins)
        for block, (block_id, number) in [*self.in_flight.items(), *self.waited_for.items()]:
            assert block.block_id == block_id, "C3: a block in flight has moved"
            assert found[block_id] == number, "C4"
        cached = {block: found[block.block_id] for block in pool.block_pool.blocks if block.block_hash}
        assert all(block.block_hash[:-4] == self.keys[number] for block, number in cached.items())
        self.check_bands({number for block, number in cached.items() if not block.ref_cnt}, found)

    def check_bands(self, free, found):
        order = self.pool.block_pool.eviction_order
        if not order.is_open:
            assert not self.worth
            return
        listed = ((block, band) for band, blocks in order.list_bands() for block in blocks)
        bands = {found[block.block_id]: band for block, band in listed if block.block_hash}
        for number in free:
            worth = self.worth.get(number)
            assert bands[number] == (DEFAULT_BAND if worth is None else find_band(worth))

    def read_all(self):
        return [read_block(self.pool, block.block_id) for block in self.pool.block_pool.blocks]

    def find_hits(self):
        """Return the content that each hash finds."""
        pool = self.pool.block_pool
        blocks = {key: pool.get_cached_block(key, [0]) for key in self.keys.values()}
        return {key: read_block(self.pool, found[0].block_id) for key, found in blocks.items() if found}

    def note_moved(self, relocation):
        """Check all contents at the new ids; no old id can have been taken yet."""
        remap = relocation.make_remap()
        for sequence_id, ids in self.by_id.items():
            self.by_id[sequence_id] = remap[ids].tolist()
        self.tally["moved"] += len(relocation.moves)
        self.forget_evicted()
        self.check()

    def forget_evicted(self):
        for sequence_id in self.evicted:
            self.release(sequence_id, set(self.held[sequence_id]))
        self.evicted.clear()

    # ---- owners' operations --------------------------------------------------------------------------

    def make_number(self, block_id):
        number = next(self.numbers)
        write(self.pool, block_id, number)
        return number

    def enter(self, sequence_id, numbers, priority):
        self.held.setdefault(sequence_id, []).extend(numbers)
        self.by_id[sequence_id] = self.pool.blocks_of(sequence_id)
        self.priorities[sequence_id] = max(self.priorities.get(sequence_id, 0), priority)

    def release(self, sequence_id, numbers):
        """Note that a sequence has lost these contents: its pins end, and its priority stays with them."""
        strength = STRENGTHS[self.priorities[sequence_id]]
        for number in numbers:
            if number in self.keys and strength:
                self.worth[number] = max(self.worth.get(number, 0), strength)
            if number in self.pins:
                block_id, names = self.pins.pop(number)
                left = [name for name in names if name != sequence_id]
                if left:
                    self.pins[number] = block_id, left
        left = [number for number in self.held[sequence_id] if number not in numbers]
        if left:
            self.held[sequence_id], self.by_id[sequence_id] = left, self.pool.blocks_of(sequence_id)
        else:
            del self.held[sequence_id], self.by_id[sequence_id], self.priorities[sequence_id]

    def make_sequence(self, family=None):
        self.num_sequences += 1
        self.family[self.num_sequences] = self.rng.randrange(NUM_FAMILIES) if family is None else family
        return self.num_sequences

    def draw_sequence(self):
        return self.rng.choice(list(self.held)) if self.held else None

    def draw_blocks(self, sequence_id):
        """Return ids and numbers of some blocks of a sequence."""
        pairs = list(zip(self.by_id[sequence_id], self.held[sequence_id], strict=True))
        chosen = self.rng.sample(pairs, self.rng.randint(1, len(pairs)))
        return [block_id for block_id, _ in chosen], [number for _, number in chosen]

    def count_holders(self, number):
        return sum(number in numbers for numbers in self.held.values())

    def hash_at(self, sequence_id, position):
        return hash_of(100 * self.family[sequence_id] + position)

    def allocate(self):
        is_new = not self.held or self.rng.random() < 0.6
        sequence_id = self.make_sequence() if is_new else self.draw_sequence()
        self.break_copies()
        num_blocks, priority = self.rng.randint(1, 7), self.rng.choice([0, 0, 1, 2])
        try:
            ids = take(
                self.pool,
                sequence_id,
                num_blocks,
                contiguous=self.rng.choice(["require", "prefer", "no"]),
                max_moves=self.rng.choice([None, 0, 2]),
                priority=priority,
            )
        except PoolExhaustedError:
            assert not self.evicted
            self.forget_evicted()
        except CopyFailedError:
            self.forget_evicted()
        else:
            assert len(ids) == num_blocks
            assert sequence_id not in self.evicted
            self.forget_evicted()
            self.enter(sequence_id, [self.make_number(block_id) for block_id in ids], priority)

    def fork(self):
        parent = self.draw_sequence()
        if parent is not None:
            child = self.make_sequence(self.family[parent])
            count = self.rng.randint(1, len(self.held[parent]))
            self.pool.fork(parent, child, count)
            self.enter(child, self.held[parent][:count], self.priorities[parent])
            self.tally["shared"] += count

    def free(self):
        """Free all blocks of a sequence, or some."""
        sequence_id = self.draw_sequence()
        if sequence_id is None:
            return
        ids, numbers = self.draw_blocks(sequence_id)
        frees_all = self.rng.random() < 0.6
        if frees_all:
            numbers = self.held[sequence_id]
        alone = [number for number in numbers if self.count_holders(number) == 1]
        if self.pins.keys() & alone:
            with pytest.raises(PinnedBlockError):
                self.pool.free_sequence(sequence_id) if frees_all else self.pool.free(ids, sequence_id)
            return
        if frees_all:
            assert self.pool.free_sequence(sequence_id) == len(alone)
        else:
            self.pool.free(ids, sequence_id)
        self.release(sequence_id, set(numbers))

    def cache(self):
        sequence_id = self.draw_sequence()
        if sequence_id is not None:
            numbers = self.held[sequence_id][: self.rng.randint(1, len(self.held[sequence_id]))]
            before = set(self.keys.values())
            for position, number in enumerate(numbers):
                if number not in self.keys:
                    self.keys[number] = self.hash_at(sequence_id, position)
                    self.tally["cached twice"] += self.keys[number] in before
            self.pool.cache_prefix(sequence_id, [self.keys[number] for number in numbers])

    def claim(self):
        sequence_id, priority = self.make_sequence(), self.rng.choice([0, 1, 2])
        hashes = [self.hash_at(sequence_id, position) for position in range(8)]
        cached = {block.block_hash[:-4] for block in self.pool.block_pool.blocks if block.block_hash}
        ids = self.pool.claim_prefix(sequence_id, hashes, priority)
        assert len(ids) == len(list(itertools.takewhile(cached.__contains__, hashes)))
        numbers = [read_block(self.pool, block_id) for block_id in ids]
        assert [self.keys[number] for number in numbers] == hashes[: len(ids)]
        if ids:
            self.enter(sequence_id, numbers, priority)
            self.tally["hit"] += len(ids)

    def pin(self):
        sequence_id = self.draw_sequence()
        if sequence_id is not None:
            ids, numbers = self.draw_blocks(sequence_id)
            name = self.rng.choice([None, sequence_id])
            try:
                self.pool.pin(ids, name)
            except PinLimitError:
                assert len(self.pins.keys() | numbers) > MAX_PINNED
                return
            for block_id, number in zip(ids, numbers, strict=True):
                self.pins.setdefault(number, (block_id, []))[1].append(name)
            assert len(self.pins) <= MAX_PINNED

    def unpin(self):
        """Remove a named pin, or one in no name, else one of the sequence that has held the block longest."""
        if self.pins:
            number = self.rng.choice(list(self.pins))
            block_id, names = self.pins[number]
            name = self.rng.choice(names)
            self.pool.unpin([block_id], name)
            if name is None and self.rng.random() < 0.5 and len(names) > 1:
                names.remove(None)
                order = [None, *self.pool.get_block_info(block_id).sequence_ids]
                self.pool.unpin([block_id])
                name = next(one for one in order if one in names)
            names.remove(name)
            if not names:
                del self.pins[number]

    # ---- behind the pool's back ------------------------------------------------------------------

    def take_off(self):
        """Take blocks of the block pool directly, to write to them from elsewhere."""
        pool = self.pool.block_pool
        count = min(self.rng.randint(1, 2), pool.get_num_free_blocks(), MAX_IN_FLIGHT - len(self.in_flight))
        for block in pool.get_new_blocks(count):
            self.in_flight[block] = (block.block_id, self.make_number(block.block_id))
            self.holds[block] = pool.hold([block], "in flight")

    def land(self):
        """Free such a block, or free it and still read it until it is reused."""
        if self.in_flight:
            block = self.rng.choice(list(self.in_flight))
            place = self.in_flight.pop(block)
            self.holds.pop(block).release()
            if self.rng.random() < 0.5:
                self.pool.block_pool.free_blocks([block])
            else:
                self.wait_for(block, place)

    def read_from_elsewhere(self):
        """Start to read a sequence's block, which may be freed meanwhile."""
        sequence_id = self.draw_sequence()
        if sequence_id is not None:
            ids, numbers = self.draw_blocks(sequence_id)
            block = self.pool.block_pool.blocks[ids[0]]
            if block not in self.waited_for:
                self.pool.block_pool.touch([block])
                self.wait_for(block, (ids[0], numbers[0]))

    def wait_for(self, block, place):
        if len(self.waited_for) < MAX_WAITED_FOR:
            self.waited_for[block] = place
            self.pool.block_pool.unpin_blocks([block], self.note_reuse)
        else:
            self.pool.block_pool.free_blocks([block])

    def note_reuse(self, block):
        block_id, number = self.waited_for.pop(block)
        assert block.block_id == block_id
        assert read_block(self.pool, block_id) == number
        self.tally["reused"] += 1

    # ---- moves -----------------------------------------------------------------------------------

    def break_copies(self):
        """Perhaps let the next copies fail, at any move."""
        self.copy.num_good = self.rng.randrange(4) if self.rng.random() < 0.3 else None

    def defragment(self):
        pool = self.pool.block_pool
        max_evictions = self.rng.choice([0, 0, 0, 2])
        hits, num_evicted, before = self.find_hits(), pool.num_evictions, invariants.Snapshot(pool)
        epoch = pool.epoch
        pool.take_events()
        self.break_copies()
        is_complete = True
        try:
            num_moved = self.pool.defragment(max_evictions, self.rng.choice([None, None, 1, 3]))
            assert (num_moved > 0) == (pool.epoch > epoch)
            self.tally["moved"] += num_moved
        except CopyFailedError:
            is_complete = False
            if pool.epoch == epoch and pool.num_evictions == num_evicted:
                invariants.check_nothing_moved(before, pool)
        events = pool.take_events()
        assert all(isinstance(event, BlockRemoved) for event in events)
        assert len(events) == pool.num_evictions - num_evicted
        assert not is_complete or len(events) <= max_evictions
        assert [id(block) for block in pool.free_block_queue.get_all_free_blocks()] == before.queue
        if len(events) == 0:
            assert self.find_hits() == hits

    def resize(self):
        size = self.pool.total_blocks
        if size < NUM_BLOCKS:
            self.pool.grow(self.rng.randint(0, NUM_BLOCKS - size))
            return
        count = self.rng.randrange(6)
        self.break_copies()
        try:
            self.pool.shrink(count)
        except (OutOfBlocksError, InvalidBlockError, CopyFailedError):
            count = 0
        assert self.pool.total_blocks == size - count

    def step(self):
        steps = {
            self.allocate: 8,
            self.free: 8,
            self.fork: 2,
            self.cache: 4,
            self.claim: 3,
            self.pin: 2,
            self.unpin: 2,
            self.take_off: 1,
            self.land: 1,
            self.read_from_elsewhere: 1,
            self.defragment: 6,
            self.resize: 2,
        }
        (step,) = self.rng.choices(list(steps), list(steps.values()))
        step()
        self.copy.num_good = None
        if not self.is_notified:
            self.by_id = {sequence_id: self.pool.blocks_of(sequence_id) for sequence_id in self.held}
        self.check()


@pytest.mark.parametrize("seed", range(60))
def test_owners_find_their_contents_after_random_calls(seed):
    life = Life(seed)
    wanted = {"moved", "shared", "cached twice", "hit", "reused"}
    for step in range(4 * NUM_STEPS):
        if step >= NUM_STEPS and wanted <= set(+life.tally):
            break
        life.step()
    assert wanted <= set(+life.tally)
