"""Random calls on the pool and on a slow model of lists; everything is checked after every step."""

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
from kv_pool.storage.copy_cpu import copy_on_cpu

NUM_BLOCKS = 24
NUM_STEPS = 150
SEEDS = range(40)


class SlowPool:
    """Sequences as lists of contents: a block is the number that is written in it, nothing else."""

    def __init__(self, pool):
        self.pool = pool
        self.contents = {}  # sequence id -> numbers in its blocks
        self.pins = {}  # number -> count
        self.next_number = 0

    def add(self, sequence_id, ids):
        held = self.contents.setdefault(sequence_id, [])
        for block_id in ids:
            self.next_number = (self.next_number + 1) % 256
            while self.next_number in self.list_numbers():
                self.next_number = (self.next_number + 1) % 256
            write(self.pool, block_id, self.next_number)
            held.append(self.next_number)

    def list_numbers(self):
        return {number for held in self.contents.values() for number in held}

    def remove(self, sequence_id, numbers):
        self.contents[sequence_id] = [held for held in self.contents[sequence_id] if held not in numbers]
        if not self.contents[sequence_id]:
            del self.contents[sequence_id]

    def count_holders(self, number):
        return sum(number in held for held in self.contents.values())

    def compare(self):
        assert sorted(self.pool.list_sequences()) == sorted(self.contents)
        for sequence_id, numbers in self.contents.items():
            assert read(self.pool, sequence_id) == numbers
        assert self.pool.get_free_blocks() == NUM_BLOCKS - len(self.list_numbers())
        assert self.pool.num_pinned_blocks == len(self.pins)


class FlakyCopy:
    """A copy that breaks off half-way when told to."""

    fails = False

    def __call__(self, source, target, sources, targets):
        half = len(sources) // 2 if self.fails else len(sources)
        copy_on_cpu(source, target, sources[:half], targets[:half])
        if self.fails:
            raise OSError("injected")


@pytest.mark.parametrize("seed", SEEDS)
def test_the_pool_is_the_slow_pool(seed):
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
    )
    model = SlowPool(pool)
    for _ in range(NUM_STEPS):
        name = draw.choice(["allocate"] * 4 + ["free", "free_sequence", "fork", "pin", "unpin", "defragment"])
        sequence_id = draw.choice([*model.contents, draw.randrange(8)])
        held = pool.blocks_of(sequence_id)
        numbers = list(model.contents.get(sequence_id, []))
        chosen = draw.sample(range(len(held)), draw.randint(0, len(held)))
        copy.fails = draw.random() < 0.2
        try:
            if name == "allocate":
                num_blocks = draw.randint(1, 7)
                ids = take(
                    pool,
                    sequence_id,
                    num_blocks,
                    priority=draw.choice([0, 0, 1, 2]),
                    contiguous=draw.choice(["require", "prefer", "no"]),
                    max_moves=draw.choice([None, 0, 2]),
                )
                assert len(ids) == num_blocks
                assert sequence_id not in evicted
                for victim in evicted:
                    del model.contents[victim]
                copy.fails = False
                model.add(sequence_id, ids)
            elif name == "free":
                pool.free([held[at] for at in chosen], sequence_id=sequence_id if held else None)
                if held:
                    model.remove(sequence_id, {numbers[at] for at in chosen})
            elif name == "free_sequence" and held:
                pool.free_sequence(sequence_id)
                del model.contents[sequence_id]
            elif name == "fork" and held and 9 not in model.contents:
                pool.fork(sequence_id, 9, len(chosen))
                if chosen:
                    model.contents[9] = numbers[: len(chosen)]
            elif name == "pin":
                pool.pin([held[at] for at in chosen])
                for at in chosen:
                    model.pins[numbers[at]] = model.pins.get(numbers[at], 0) + 1
            elif name == "unpin":
                pinned = [at for at in chosen if numbers[at] in model.pins]
                pool.unpin([held[at] for at in pinned])
                for at in pinned:
                    model.pins[numbers[at]] -= 1
                    model.pins = {number: count for number, count in model.pins.items() if count}
            elif name == "defragment":
                pool.defragment()
        except PinnedBlockError:
            assert any(number in model.pins and model.count_holders(number) == 1 for number in numbers)
        except PoolExhaustedError:
            assert not evicted
        except CopyFailedError:
            for victim in evicted:
                del model.contents[victim]
        except PinLimitError:
            assert len(model.pins) + len(chosen) > 6
            assert name == "pin"
        evicted.clear()
        copy.fails = False
        check(pool)
        model.compare()
