"""Random calls on the pool and on a slow model of lists; everything is checked after every step."""

import itertools
import random

import pytest
from adapter.made_pool import check, make, make_storage, read, take, write

from kv_pool import (
    CopyFailedError,
    LRUEviction,
    PinLimitError,
    PinnedBlockError,
    PoolExhaustedError,
)
from kv_pool.contiguous.run_index import PLACEMENTS
from kv_pool.core.eviction_order import DEFAULT_BAND
from kv_pool.manager.retention.claims import find_band
from kv_pool.storage.copy_cpu import copy_on_cpu

NUM_BLOCKS = 24
NUM_STEPS = 150
SEEDS = range(40)
STRENGTHS = (0, 65, 95)
"""The strengths of directives for blocks of sequences of priority 0, 1, 2; 0 for no directive."""
NAMES = ["allocate"] * 4 + [
    "free",
    "free_sequence",
    "fork",
    "cache",
    "cache",
    "claim",
    "pin",
    "unpin",
    "defragment",
]


class SlowPool:
    """A slow model: sequences are lists of contents, and a block is only the number written in it.

    A cached block is also a number, under its own hash; its priority is the highest of the sequences that
    released it.
    """

    def __init__(self, pool):
        self.pool = pool
        self.contents = {}  # sequence id -> numbers in its blocks
        self.priorities = {}  # sequence id -> the highest of its requests
        self.pins = {}  # number -> count
        self.hashes = {}  # number -> hash, while the block is cached
        self.worth = {}  # hash -> highest retention priority
        self.chains = []  # the hashes of a sequence's cached blocks
        self.next_number = 0

    def add(self, sequence_id, ids):
        held = self.contents.setdefault(sequence_id, [])
        for block_id in ids:
            self.next_number = (self.next_number + 1) % 256
            while self.next_number in self.list_numbers() | self.hashes.keys():
                self.next_number = (self.next_number + 1) % 256
            write(self.pool, block_id, self.next_number)
            held.append(self.next_number)

    def list_numbers(self):
        return {number for held in self.contents.values() for number in held}

    def raise_priority(self, sequence_id, priority):
        self.priorities[sequence_id] = max(self.priorities.get(sequence_id, 0), priority)

    def cache(self, sequence_id, count):
        chain = []
        for number in self.contents[sequence_id][:count]:
            chain.append(self.hashes.setdefault(number, b"%d of %d" % (len(self.chains), number)))
        self.chains.append(chain)
        return chain

    def claim(self, sequence_id, chain):
        """Start a new sequence with the longest cached prefix of the chain."""
        numbers = {block_hash: number for number, block_hash in self.hashes.items()}
        hits = [numbers[block_hash] for block_hash in itertools.takewhile(numbers.__contains__, chain)]
        if hits:
            self.contents[sequence_id] = hits
        return hits

    def note_reuse(self):
        """Forget evicted blocks; the pool may evict only free blocks."""
        cached = {block.block_hash[:-4] for block in self.pool.block_pool.blocks if block.block_hash}
        for number, block_hash in list(self.hashes.items()):
            if block_hash not in cached:
                assert number not in self.list_numbers()
                del self.hashes[number]
                self.worth.pop(block_hash, None)

    def unpin(self, number):
        """Remove a pin in no name, else one of the sequence that has held the block longest."""
        names = self.pins[number]
        if None in names:
            names.remove(None)
        else:
            block_id = next(
                self.pool.blocks_of(holder)[held.index(number)]
                for holder, held in self.contents.items()
                if number in held
            )
            order = self.pool.get_block_info(block_id).sequence_ids
            names.remove(next(one for one in order if one in names))
        if not names:
            del self.pins[number]

    def remove(self, sequence_id, numbers):
        for number in numbers & self.pins.keys():
            left = [one for one in self.pins.pop(number) if one != sequence_id]
            if left:
                self.pins[number] = left
        strength = STRENGTHS[self.priorities[sequence_id]]
        for block_hash in (self.hashes[number] for number in numbers if number in self.hashes and strength):
            self.worth[block_hash] = max(self.worth.get(block_hash, 0), strength)
        self.contents[sequence_id] = [held for held in self.contents[sequence_id] if held not in numbers]
        if not self.contents[sequence_id]:
            del self.contents[sequence_id]
            del self.priorities[sequence_id]

    def remove_all(self, sequence_id):
        self.remove(sequence_id, set(self.contents[sequence_id]))

    def count_holders(self, number):
        return sum(number in held for held in self.contents.values())

    def compare(self):
        assert sorted(self.pool.list_sequences()) == sorted(self.contents)
        for sequence_id, numbers in self.contents.items():
            assert read(self.pool, sequence_id) == numbers
        assert self.pool.get_free_blocks() == NUM_BLOCKS - len(self.list_numbers())
        assert self.pool.num_pinned_blocks == len(self.pins)
        bands = {
            block.block_hash[:-4]: band
            for band, blocks in self.pool.block_pool.eviction_order.list_bands()
            for block in blocks
            if block.block_hash
        }
        if self.pool.block_pool.eviction_order.is_open:
            free = {
                block_hash for number, block_hash in self.hashes.items() if number not in self.list_numbers()
            }
            assert bands == {
                one: find_band(self.worth[one]) if one in self.worth else DEFAULT_BAND for one in free
            }
        else:
            assert not self.worth


class FlakyCopy:
    """A copy that fails half-way on request."""

    fails = False

    def __call__(self, source, target, sources, targets):
        half = len(sources) // 2 if self.fails else len(sources)
        copy_on_cpu(source, target, sources[:half], targets[:half])
        if self.fails:
            raise OSError("injected")


@pytest.mark.parametrize("seed", SEEDS)
def test_the_pool_behaves_like_the_slow_model(seed):
    draw = random.Random(seed)
    copy = FlakyCopy()
    evicted = []
    pool = make(
        NUM_BLOCKS,
        storage=make_storage(NUM_BLOCKS + 1, copy),
        reserved_blocks=draw.choice([0, 3]),
        max_pinned_blocks=6,
        eviction_policy=draw.choice([None, LRUEviction()]),
        on_evicted=lambda sequence_id, ids: evicted.append(sequence_id),
        on_moved=draw.choice([None, lambda relocation: None]),
        placement=draw.choice(PLACEMENTS),
    )
    model = SlowPool(pool)
    for _ in range(NUM_STEPS):
        name = draw.choice(NAMES)
        sequence_id = draw.choice([*model.contents, draw.randrange(8)])
        held = pool.blocks_of(sequence_id)
        numbers = list(model.contents.get(sequence_id, []))
        chosen = draw.sample(range(len(held)), draw.randint(0, len(held)))
        copy.fails = draw.random() < 0.2
        try:
            if name == "allocate":
                num_blocks = draw.randint(1, 7)
                priority = draw.choice([0, 0, 1, 2])
                ids = take(
                    pool,
                    sequence_id,
                    num_blocks,
                    priority=priority,
                    contiguous=draw.choice(["require", "prefer", "no"]),
                    max_moves=draw.choice([None, 0, 2]),
                )
                assert len(ids) == num_blocks
                assert sequence_id not in evicted
                for victim in evicted:
                    model.remove_all(victim)
                copy.fails = False
                model.note_reuse()
                model.raise_priority(sequence_id, priority)
                model.add(sequence_id, ids)
            elif name == "free":
                pool.free([held[at] for at in chosen], sequence_id=sequence_id if held else None)
                if held:
                    model.remove(sequence_id, {numbers[at] for at in chosen})
            elif name == "free_sequence" and held:
                pool.free_sequence(sequence_id)
                model.remove_all(sequence_id)
            elif name == "fork" and held and 9 not in model.contents:
                pool.fork(sequence_id, 9, len(chosen))
                if chosen:
                    model.contents[9] = numbers[: len(chosen)]
                    model.raise_priority(9, model.priorities[sequence_id])
            elif name == "cache" and held:
                pool.cache_prefix(sequence_id, model.cache(sequence_id, len(chosen)))
            elif name == "claim" and not held and model.chains:
                chain = draw.choice(model.chains)
                priority = draw.choice([0, 1, 2])
                hits = model.claim(sequence_id, chain)
                assert len(pool.claim_prefix(sequence_id, chain, priority)) == len(hits)
                if hits:
                    model.raise_priority(sequence_id, priority)
            elif name == "pin":
                named = sequence_id if held and draw.random() < 0.5 else None
                pool.pin([held[at] for at in chosen], named)
                for at in chosen:
                    model.pins.setdefault(numbers[at], []).append(named)
            elif name == "unpin":
                pinned = [at for at in chosen if numbers[at] in model.pins]
                pool.unpin([held[at] for at in pinned])
                for at in pinned:
                    model.unpin(numbers[at])
            elif name == "defragment":
                pool.defragment()
        except PinnedBlockError:
            assert any(number in model.pins and model.count_holders(number) == 1 for number in numbers)
        except PoolExhaustedError:
            assert not evicted
        except CopyFailedError:
            for victim in evicted:
                model.remove_all(victim)
        except PinLimitError:
            assert len(model.pins) + len(chosen) > 6
            assert name == "pin"
        evicted.clear()
        copy.fails = False
        check(pool)
        model.note_reuse()
        model.compare()
