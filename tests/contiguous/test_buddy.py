"""`BuddySystem` against a model that checks every chunk of every order."""

import random

import pytest

from kv_pool import BlockAllocationRequest, GPUKVPool
from kv_pool.contiguous.buddy import BuddySystem
from kv_pool.contiguous.run_pool import RunBlockPool

EMPTY = 1


def list_chunks(ages):
    """Return the maximal free chunks as (first, order): all ids free, but not all ids of their parent."""
    num_orders = len(ages).bit_length()

    def is_free(first, order):
        end = first + 2**order
        return end <= len(ages) and 0 not in ages[first:end]

    return {
        (first, order)
        for order in range(num_orders)
        for first in range(0, len(ages), 2**order)
        if is_free(first, order) and not is_free(first - first % 2 ** (order + 1), order + 1)
    }


def read_chunks(buddies, ages):
    chunks = buddies.list_chunks(ages)
    assert buddies.counts == [sum(at == order for _, at in chunks) for order in range(len(buddies.counts))]
    return set(chunks)


def make_ages(text):
    """Return the ages of a picture: a dot is in use, a digit an age."""
    return bytearray(0 if one == "." else int(one) for one in text.replace(" ", ""))


@pytest.mark.parametrize(
    ("picture", "num_blocks", "good_age", "found"),
    [
        (".111 1111 1111 1111", 1, 1, 1),
        (".111 1111 1111 1111", 2, 1, 2),
        (".111 1111 1111 1111", 3, 1, 4),  # a whole chunk of four; its last id stays free
        (".111 1111 1111 1111", 8, 1, 8),
        (".111 1111 1111 1111", 9, 1, 0),
        (".111 1111 ...1 1111", 4, 1, 4),
        (".111 11.1 1111 1111", 4, 1, 8),  # no smaller chunk than 8 to 15
        (".... 9999 11.. 1111", 4, 2, 12),  # of equal chunks the one with the oldest content
        (".... 9999 1111 1111", 4, 2, 8),  # a larger one if the smaller ones are too young
        (".... 9999 1111 1111", 4, 9, 4),
        (".... 9999 8888 7777", 4, 2, 12),  # the oldest of the young ones
        ("1... 1...", 2, 1, 0),
    ],
)
def test_a_run_comes_from_the_smallest_old_chunk(picture, num_blocks, good_age, found):
    ages = make_ages(picture)
    assert BuddySystem().find_run(num_blocks, ages, good_age, 255) == found


@pytest.mark.parametrize(
    ("picture", "max_age", "found"),
    [
        (".111 1111", 1, 1),
        ("..11 1.11", 1, 4),
        ("..11 9.11", 1, 2),
        ("..99 9.11", 1, 6),
        ("..99 9.99", 1, 0),
        ("..99 9.99", 9, 4),
    ],
)
def test_a_single_block_comes_from_the_smallest_old_chunk(picture, max_age, found):
    assert BuddySystem().find_single(make_ages(picture), max_age) == found
    assert BuddySystem().find_run(1, make_ages(picture), max_age, max_age) == found


def run_life(seed, num_steps):
    """Take and free ranges at random, and compare with the model."""
    draw = random.Random(seed)
    ages = bytearray(draw.choice((1, 2, 15, 64, 100)))
    buddies = BuddySystem()
    for step in range(num_steps):
        length = draw.choice((1, 1, 1, 2, 5, 16, 40))
        first = draw.randrange(1, 1 + len(ages))  # 0 is the null block
        end = min(len(ages), first + length)
        ages[first:end] = bytes([draw.choice((0, 0, 1, 9))]) * max(0, end - first)
        buddies.note_changed(first, end)
        if draw.random() < 0.01:
            size = draw.choice((1, 7, 32, 130))
            ages[size:] = bytes([EMPTY]) * max(0, size - len(ages))
            buddies.note_all_changed()
        if draw.random() < 0.5:
            assert read_chunks(buddies, ages) == list_chunks(ages), (seed, step)
            count = draw.choice((1, 2, 3, 4, 8, 11))
            found = buddies.find_run(count, ages, 5, 255)
            order = (count - 1).bit_length()
            fitting = [(at, size) for at, size in list_chunks(ages) if size >= order]
            assert bool(found) == bool(fitting), (seed, step)
            if found:
                assert found % 2**order == 0
                assert 0 not in ages[found : found + count]


@pytest.mark.parametrize("seed", range(20))
def test_chunks_agree_with_a_slow_model(seed):
    run_life(seed, 500)


class PoolLife:
    """Take runs and single blocks, and free them in any order."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.pool = RunBlockPool(self.draw.choice((9, 40, 100)), True, 4, placement="buddy")
        self.tables = []
        self.num_cached = 0

    def step(self):
        step = self.draw.choice(
            (self.take_run, self.take_single, self.take_some, self.free, self.free, self.cache)
        )
        step()
        check_chunks(self.pool)

    def take_run(self):
        """A run of a power of two is aligned while such a chunk is free; no other block is taken."""
        order = self.draw.randrange(5)
        count = self.draw.randint(2**order // 2 + 1, 2**order)
        num_free = self.pool.get_num_free_blocks()
        if count > num_free:
            return
        has_chunk = any(size >= order for _, size in list_chunks(self.pool.run_index.ages))
        run = self.pool.get_new_run(count)
        if run is None:
            assert not has_chunk
            return
        first = run[0].block_id
        assert [block.block_id for block in run] == list(range(first, first + count))
        assert self.pool.get_num_free_blocks() == num_free - count
        if has_chunk:
            assert first % 2**order == 0
        self.tables.append(run)

    def take_single(self):
        if self.pool.get_num_free_blocks():
            self.tables.append(self.pool.get_new_blocks(1))

    def take_some(self):
        count = self.draw.randint(2, 9)
        if count <= self.pool.get_num_free_blocks():
            self.tables.append(self.pool.get_new_blocks(count))
            assert len(set(self.tables[-1])) == count

    def free(self):
        if self.tables:
            table = self.tables.pop(self.draw.randrange(len(self.tables)))
            if self.draw.random() < 0.3:
                self.tables.append(table[: len(table) // 2])
                table = table[len(table) // 2 :]
            self.pool.free_blocks(table)

    def cache(self):
        for block in self.draw.choice(self.tables or [[]]):
            if block.block_hash is None:
                self.num_cached += 1
                self.pool._insert_block_hash(b"hash %d" % self.num_cached, block, 4)

    def end(self):
        """After all blocks are freed, the chunks are those of a new pool."""
        for table in self.tables:
            self.pool.free_blocks(table)
        fresh = bytearray([0] + [EMPTY] * (self.pool.num_gpu_blocks - 1))
        assert set(self.pool.run_index.buddies.list_chunks(self.pool.run_index.ages)) == list_chunks(fresh)


def check_chunks(pool):
    index = pool.run_index
    if index.buddies is not None:
        assert set(index.buddies.list_chunks(index.ages)) == list_chunks(index.ages)


@pytest.mark.parametrize("seed", range(10))
def test_a_pool_follows_runs_single_blocks_and_frees(seed):
    life = PoolLife(seed)
    for _ in range(300):
        life.step()
    life.end()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 220))
def test_a_pool_follows_runs_single_blocks_and_frees_for_long(seed):
    life = PoolLife(seed)
    for _ in range(5_000):
        life.step()
    life.end()


def test_runs_of_a_fresh_pool_are_aligned():
    pool = GPUKVPool(64, 16)
    first = {}
    for number, count in enumerate((5, 4, 8, 16)):
        first[count] = pool.allocate(BlockAllocationRequest(count, number))[0]
    assert first == {5: 8, 4: 4, 8: 16, 16: 32}
    assert pool.allocate(BlockAllocationRequest(3, 0)) == [13, 14, 15]  # the rest of its chunk
    assert pool.allocate(BlockAllocationRequest(1, 9)) == [1]  # the smallest chunk
