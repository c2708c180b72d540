import random

import numpy as np
import pytest

from kv_pool import InvalidArgumentError, InvalidBlockError, InvalidTypeError
from kv_pool.ids import BlockMove
from kv_pool.storage.block_storage import parse_moves, split_rounds


def test_a_plan_becomes_two_arrays_in_plan_order():
    sources, targets = parse_moves([BlockMove(3, 1), BlockMove(source=2, target=0)], 4, 4, same_blocks=True)
    assert sources.tolist() == [3, 2]
    assert targets.tolist() == [1, 0]
    assert sources.dtype == targets.dtype == np.int64


@pytest.mark.parametrize("empty", [[], (), np.empty((0, 2), np.uint8)], ids=repr)
def test_an_empty_plan_is_accepted(empty):
    assert [ids.tolist() for ids in parse_moves(empty, 4, 4, same_blocks=True)] == [[], []]


@pytest.mark.parametrize(
    "wrong",
    [
        [(1.0, 2)],
        [(1, 2, 3)],
        [1, 2],
        ["ab"],
        [(1, 2), (3,)],
        7,
        np.zeros((2, 3), int),
        [(True, False)],
        [(1, None)],
    ],
    ids=repr,
)
def test_a_plan_must_be_pairs_of_integers(wrong):
    with pytest.raises(
        InvalidTypeError, match=r"a plan is a list of BlockMove|a move has a source and a target"
    ):
        parse_moves(wrong, 4, 4, same_blocks=True)


@pytest.mark.parametrize(
    ("moves", "said"),
    [
        ([(0, 1), (4, 2)], "move 1 has block 4 as its source; block ids are 0 to 3"),
        ([(-1, 1)], "move 0 has block -1 as its source"),
        ([(0, 6)], "move 0 has block 6 as its target; block ids are 0 to 5"),
        ([(0, -2)], "move 0 has block -2 as its target"),
    ],
)
def test_an_unknown_block_id_is_refused(moves, said):
    with pytest.raises(InvalidBlockError, match=said):
        parse_moves(moves, 4, 6, same_blocks=False)


def test_two_moves_to_one_target_are_refused():
    with pytest.raises(InvalidArgumentError, match="block 2 is the target of two moves"):
        parse_moves([(0, 2), (1, 2)], 4, 4, same_blocks=False)


def test_a_move_of_a_block_to_itself_is_refused():
    with pytest.raises(InvalidArgumentError, match="block 1 is moved to itself"):
        parse_moves([(0, 2), (1, 1)], 4, 4, same_blocks=True)
    parse_moves([(0, 2), (1, 1)], 4, 4, same_blocks=False)


# ---- rounds ------------------------------------------------------------------------------------------


def split(moves, scratch_ids):
    """Return the rounds as lists of pairs."""
    sources, targets = parse_moves(moves, 20, 20, same_blocks=True)
    return [
        list(zip(first.tolist(), second.tolist(), strict=True))
        for first, second in split_rounds(sources, targets, scratch_ids)
    ]


def run(rounds, num_blocks):
    """Return the content of each block after the rounds, with the moves of a round in any order."""
    slots = list(range(num_blocks))
    for moves in rounds:
        assert {source for source, _ in moves}.isdisjoint(target for _, target in moves)
        for source, target in reversed(moves):
            slots[target] = slots[source]
    return slots


def test_a_swap_goes_through_a_scratch_block():
    assert split([(1, 2), (2, 1)], [9]) == [[(1, 9)], [(2, 1)], [(9, 2)]]


def test_a_cycle_without_a_scratch_block_is_refused():
    with pytest.raises(InvalidArgumentError, match="is part of a cycle of moves"):
        split([(1, 2), (2, 1)], [])
    with pytest.raises(InvalidArgumentError, match="is part of a cycle of moves"):
        split([(1, 2), (2, 1), (9, 3)], [9])


@pytest.mark.parametrize("num_scratch", [1, 2, 5])
@pytest.mark.parametrize("seed", range(25), ids=lambda seed: f"seed{seed}")
def test_random_rounds_equal_simultaneous_moves(seed, num_scratch):
    rng = random.Random(seed)
    num_blocks = rng.randrange(2, 15)
    if rng.random() < 0.5:  # cycles only
        ids = rng.sample(range(num_blocks), num_blocks)
        moves = [(source, target) for source, target in enumerate(ids) if source != target]
    else:
        targets = rng.sample(range(num_blocks), rng.randint(1, num_blocks))
        moves = [(rng.choice([i for i in range(num_blocks) if i != target]), target) for target in targets]
    expected = list(range(num_blocks))
    for source, target in moves:
        expected[target] = source
    if moves:
        rounds = split(moves, range(num_blocks, num_blocks + num_scratch))
        assert run(rounds, num_blocks + num_scratch)[:num_blocks] == expected
