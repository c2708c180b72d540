"""`BuddySystem` against a model that checks every chunk of every order."""

import random

import pytest

from kv_pool import BlockAllocationRequest, GPUKVPool
from kv_pool.contiguous.buddy import BuddySystem
from kv_pool.contiguous.invariants import list_chunks

EMPTY = 1


def read_chunks(buddies, ages):
    chunks = buddies.list_chunks(ages)
    assert buddies.counts == [sum(at == order for _, at in chunks) for order in range(len(buddies.counts))]
    return chunks


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


def test_runs_of_a_fresh_pool_are_aligned():
    pool = GPUKVPool(64, 16)
    first = {}
    for number, count in enumerate((5, 4, 8, 16)):
        first[count] = pool.allocate(BlockAllocationRequest(count, number))[0]
    assert first == {5: 8, 4: 4, 8: 16, 16: 32}
    assert pool.allocate(BlockAllocationRequest(3, 0)) == [13, 14, 15]  # the rest of its chunk
    assert pool.allocate(BlockAllocationRequest(1, 9)) == [1]  # the smallest chunk
