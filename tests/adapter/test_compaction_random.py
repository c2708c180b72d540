"""Random operations over real memory: wherever blocks move, their owners find each byte that they wrote.

Blocks are pinned, shared, cached, cached twice, in flight; the memory has engines' layouts; and copies fail.
A slow model records which sequence owns which content, by number.
"""

import random
from collections import Counter

import numpy as np
import pytest
from adapter.made_pool import make, take
from adapter.owned_memory import MEMORIES, BreakingCopy
from drawing import hash_of

from kv_pool import CopyFailedError, LRUEviction, PinLimitError, PoolExhaustedError
from kv_pool.contiguous import invariants
from kv_pool.contiguous.run_index import PLACEMENTS
from kv_pool.core.kv_events import BlockRemoved

NUM_BLOCKS, NUM_STEPS, NUM_FAMILIES = 40, 250, 3
MAX_IN_FLIGHT, MAX_WAITED_FOR = 3, 4


class Life:
    """A pool over memory, and the owners of its contents; a content is a number, never written twice."""

    def __init__(self, name, seed):
        self.rng = random.Random(f"{name} {seed}")
        self.noise = np.random.default_rng(self.rng.getrandbits(32))
        self.copy = BreakingCopy()
        self.memory = MEMORIES[name](self.noise, NUM_BLOCKS + 1, self.copy)
        self.pool = make(
            NUM_BLOCKS,
            storage=self.memory.storage,
            run_length=4,
            max_pinned_blocks=6,
            eviction_policy=self.rng.choice([None, LRUEviction()]),
            on_evicted=lambda sequence_id, _: self.evicted.append(sequence_id),
            on_moved=self.note_moved,
            placement=self.rng.choice(PLACEMENTS),
        )
        self.pool.block_pool.enable_kv_cache_events = True
        self.evicted = []
        self.contents = []  # by number, the bytes
        self.held = {}  # sequence -> numbers of its blocks
        self.family = {}  # sequence -> the sequence whose prefix it shares
        self.cached = {}  # hash -> numbers that were ever cached under it
        self.keyed = set()  # all of those
        self.pins = {}  # number -> [times pinned, id]
        self.in_flight = {}  # block taken behind the pool's back -> (id, number)
        self.holds = {}  # the holds on these
        self.waited_for = {}  # watched block -> (id, number)
        self.by_id = {}  # sequence -> ids, kept up to date by relocations only
        self.num_sequences = 0
        self.padding = self.memory.bytes[self.memory.padding]
        self.null_block = self.memory.read_all()[0]
        self.tally = Counter()

    # ---- checks ------------------------------------------------------------------------------

    def check(self):
        """Check that every owner finds its bytes, and that fixed blocks have not moved."""
        invariants.check(self.pool.block_pool)
        found = self.memory.read_all()
        assert sorted(self.pool.list_sequences()) == sorted(self.held)
        for sequence_id, numbers in self.held.items():
            ids = self.pool.blocks_of(sequence_id)
            assert ids == self.by_id[sequence_id], "C8: told otherwise"
            assert len(ids) == len(numbers)
            for block_id, number in zip(ids, numbers, strict=True):
                self.check_content(found, block_id, number)
                if number in self.pins:
                    assert block_id == self.pins[number][1], "C3: a pinned block has moved"
        for block, (block_id, number) in [*self.in_flight.items(), *self.waited_for.items()]:
            assert block.block_id == block_id, "C3: a block in flight has moved"
            self.check_content(found, block_id, number)
        for block in self.pool.block_pool.blocks:
            if block.block_hash is not None:
                assert any(
                    found[block.block_id] == self.contents[number]
                    for number in self.cached[block.block_hash[:-4]]
                )
        assert np.array_equal(self.memory.bytes[self.memory.padding], self.padding)
        assert found[0] == self.null_block

    def check_content(self, found, block_id, number):
        assert found[block_id] == self.contents[number], f"C4: slot {block_id} is not {number}"

    def find_hits(self):
        """Return the bytes that each hash finds."""
        found = self.memory.read_all()
        pool = self.pool.block_pool
        hits = {}
        for block_hash in self.cached:
            blocks = pool.get_cached_block(block_hash, [0])
            if blocks:
                hits[block_hash] = found[blocks[0].block_id]
        return hits

    def note_moved(self, relocation):
        """Check all bytes at the new ids; no old id can have been taken yet."""
        remap = relocation.make_remap()
        for sequence_id, ids in self.by_id.items():
            self.by_id[sequence_id] = remap[ids].tolist()
        self.tally["moved"] += len(relocation.moves)
        sources = {source for source, _ in relocation.moves}
        self.tally["exchanged"] += sum(target in sources for _, target in relocation.moves) // 2
        self.forget_evicted()
        self.check()

    def forget_evicted(self):
        for sequence_id in self.evicted:
            self.forget(sequence_id)
        self.tally["evicted"] += len(self.evicted)
        self.evicted.clear()

    # ---- owners' operations --------------------------------------------------------------------------

    def write(self, block_id):
        """Make new content and return its number."""
        self.contents.append(self.noise.bytes(self.memory.places.shape[1]))
        self.memory.write(block_id, self.contents[-1])
        return len(self.contents) - 1

    def enter(self, sequence_id, numbers):
        self.held.setdefault(sequence_id, []).extend(numbers)
        self.by_id[sequence_id] = self.pool.blocks_of(sequence_id)

    def forget(self, sequence_id):
        del self.held[sequence_id], self.by_id[sequence_id], self.family[sequence_id]

    def make_sequence(self, family=None):
        self.num_sequences += 1
        self.family[self.num_sequences] = self.rng.randrange(NUM_FAMILIES) if family is None else family
        return self.num_sequences

    def draw_sequence(self):
        return self.rng.choice(list(self.held)) if self.held else None

    def hash_at(self, sequence_id, position):
        return hash_of(100 * self.family[sequence_id] + position)

    def allocate(self):
        is_new = not self.held or self.rng.random() < 0.6
        sequence_id = self.make_sequence() if is_new else self.draw_sequence()
        self.break_copies()
        ids = []
        try:
            ids = take(
                self.pool,
                sequence_id,
                self.rng.randint(1, 6),
                contiguous=self.rng.choice(["require", "prefer", "no"]),
                max_moves=self.rng.choice([None, 0, 2]),
                priority=self.rng.choice([0, 0, 1]),
            )
        except PoolExhaustedError:
            self.tally["refused"] += 1
        except CopyFailedError:
            self.tally["broken off"] += 1
        self.forget_evicted()
        if ids:
            self.enter(sequence_id, [self.write(block_id) for block_id in ids])
        elif is_new:
            del self.family[sequence_id]

    def fork(self):
        parent = self.draw_sequence()
        if parent is not None:
            child = self.make_sequence(self.family[parent])
            count = self.rng.randint(1, len(self.held[parent]))
            self.pool.fork(parent, child, count)
            self.enter(child, self.held[parent][:count])
            self.tally["shared"] += count

    def free(self):
        """Free all blocks of a sequence, or its tail."""
        sequence_id = self.draw_sequence()
        if sequence_id is None:
            return
        first = 0 if self.rng.random() < 0.7 else self.rng.randrange(len(self.held[sequence_id]))
        numbers = self.held[sequence_id][first:]
        if not self.pins.keys().isdisjoint(numbers):
            return
        self.pool.free(self.pool.blocks_of(sequence_id)[first:], sequence_id)
        if first:
            del self.held[sequence_id][first:], self.by_id[sequence_id][first:]
        else:
            self.forget(sequence_id)

    def cache(self):
        sequence_id = self.draw_sequence()
        if sequence_id is not None:
            numbers = self.held[sequence_id]
            count = self.rng.randint(1, len(numbers))
            hashes = [self.hash_at(sequence_id, position) for position in range(count)]
            self.pool.cache_prefix(sequence_id, hashes)
            for number, block_hash in zip(numbers, hashes, strict=False):
                if number not in self.keyed:
                    self.tally["cached twice"] += block_hash in self.cached
                    self.cached.setdefault(block_hash, []).append(number)
                    self.keyed.add(number)

    def claim(self):
        sequence_id = self.make_sequence()
        hashes = [self.hash_at(sequence_id, position) for position in range(8)]
        ids = self.pool.claim_prefix(sequence_id, hashes)
        found = self.memory.read_all()
        numbers = []
        for block_id, block_hash in zip(ids, hashes, strict=False):
            [number] = [
                number for number in self.cached[block_hash] if found[block_id] == self.contents[number]
            ]
            numbers.append(number)
        if ids:
            self.enter(sequence_id, numbers)
            self.tally["hit"] += len(ids)
        else:
            del self.family[sequence_id]

    def pin(self):
        sequence_id = self.draw_sequence()
        if sequence_id is not None:
            position = self.rng.randrange(len(self.held[sequence_id]))
            block_id, number = self.by_id[sequence_id][position], self.held[sequence_id][position]
            try:
                self.pool.pin([block_id])
            except PinLimitError:
                return
            self.pins.setdefault(number, [0, block_id])[0] += 1

    def unpin(self):
        if self.pins:
            number = self.rng.choice(list(self.pins))
            self.pool.unpin([self.pins[number][1]])
            self.pins[number][0] -= 1
            if not self.pins[number][0]:
                del self.pins[number]

    # ---- behind the pool's back ------------------------------------------------------------------

    def take_off(self):
        """Take blocks of the block pool directly, to write to them from elsewhere."""
        pool = self.pool.block_pool
        count = min(self.rng.randint(1, 2), pool.get_num_free_blocks(), MAX_IN_FLIGHT - len(self.in_flight))
        for block in pool.get_new_blocks(count):
            self.in_flight[block] = (block.block_id, self.write(block.block_id))
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
                self.wait_for([block], [place])

    def read_from_elsewhere(self):
        """Start to read a sequence's block, which may be freed meanwhile."""
        sequence_id = self.draw_sequence()
        if sequence_id is not None:
            position = self.rng.randrange(len(self.held[sequence_id]))
            block_id = self.by_id[sequence_id][position]
            block = self.pool.block_pool.blocks[block_id]
            if block not in self.waited_for:
                self.pool.block_pool.touch([block])
                self.wait_for([block], [(block_id, self.held[sequence_id][position])])

    def wait_for(self, blocks, places):
        if len(self.waited_for) < MAX_WAITED_FOR:
            self.waited_for.update(zip(blocks, places, strict=True))
            self.pool.block_pool.unpin_blocks(blocks, self.note_reuse)
        else:
            self.pool.block_pool.free_blocks(blocks)

    def note_reuse(self, block):
        block_id, number = self.waited_for.pop(block)
        assert block.block_id == block_id
        self.check_content(self.memory.read_all(), block_id, number)
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
        except CopyFailedError:
            is_complete = False
            self.tally["broken off"] += 1
            if pool.epoch == epoch and pool.num_evictions == num_evicted:
                invariants.check_nothing_moved(before, pool)
        events = pool.take_events()
        assert all(isinstance(event, BlockRemoved) for event in events)
        assert len(events) == pool.num_evictions - num_evicted
        assert not is_complete or len(events) <= max_evictions
        assert [id(block) for block in pool.free_block_queue.get_all_free_blocks()] == before.queue
        if len(events) == 0:
            assert self.find_hits() == hits
        if not is_complete and len(events) > max_evictions:
            self.tally["exchanges broken off"] += 1
        self.tally["overwritten"] += len(events)

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
        }
        (step,) = self.rng.choices(list(steps), list(steps.values()))
        step()
        self.copy.num_good = None
        self.check()


@pytest.mark.parametrize("seed", range(3), ids=lambda seed: f"seed{seed}")
@pytest.mark.parametrize("name", MEMORIES)
def test_owners_find_their_bytes_after_random_moves(name, seed):
    life = Life(name, seed)
    wanted = {"moved", "shared", "cached twice", "hit", "reused"}
    for step in range(4 * NUM_STEPS):
        if step >= NUM_STEPS and wanted <= set(+life.tally):
            break
        life.step()
    assert wanted <= set(+life.tally)
