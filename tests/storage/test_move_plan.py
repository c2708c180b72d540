import numpy as np
import pytest

from kv_pool import InvalidArgumentError, InvalidBlockError, InvalidTypeError
from kv_pool.ids import BlockMove
from kv_pool.storage.move_plan import check_moves


def test_a_plan_becomes_two_arrays_in_its_order():
    sources, targets = check_moves([BlockMove(3, 1), BlockMove(source=2, target=0)], 4, 4, same_blocks=True)
    assert sources.tolist() == [3, 2]
    assert targets.tolist() == [1, 0]
    assert sources.dtype == targets.dtype == np.int64


@pytest.mark.parametrize("empty", [[], (), np.empty((0, 2), np.int32)], ids=repr)
def test_an_empty_plan_is_a_plan(empty):
    assert [ids.tolist() for ids in check_moves(empty, 4, 4, same_blocks=True)] == [[], []]


def test_an_array_of_pairs_is_a_plan():
    assert check_moves(np.array([[3, 1]], np.uint8), 4, 4, same_blocks=True)[0].tolist() == [3]


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
def test_what_is_no_list_of_pairs_of_integers_is_refused(wrong):
    with pytest.raises(
        InvalidTypeError, match=r"a plan is a list of BlockMove|a move has a source and a target"
    ):
        check_moves(wrong, 4, 4, same_blocks=True)


@pytest.mark.parametrize(
    ("moves", "said"),
    [
        ([(0, 1), (4, 2)], "move 1 has block 4 as its source; there are blocks 0 to 3"),
        ([(-1, 1)], "move 0 has block -1 as its source"),
        ([(0, 6)], "move 0 has block 6 as its target; there are blocks 0 to 5"),
        ([(0, -2)], "move 0 has block -2 as its target"),
    ],
)
def test_a_block_of_no_storage_is_refused(moves, said):
    with pytest.raises(InvalidBlockError, match=said):
        check_moves(moves, 4, 6, same_blocks=False)


def test_two_moves_with_one_target_are_refused():
    with pytest.raises(InvalidArgumentError, match="block 2 is the target of two moves"):
        check_moves([(0, 2), (1, 2)], 4, 4, same_blocks=False)


@pytest.mark.parametrize("moves", [[(0, 1), (1, 2)], [(1, 2), (0, 1)], [(0, 1), (1, 0)], [(1, 1)]], ids=repr)
def test_a_block_is_not_read_and_written_in_one_plan(moves):
    with pytest.raises(InvalidArgumentError, match=r"block [01] is the target of one move and the source"):
        check_moves(moves, 4, 4, same_blocks=True)
    check_moves(moves, 4, 4, same_blocks=False)
