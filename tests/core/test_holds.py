import random
from collections import Counter

import pytest
from drawing import blocks, make_pool, state

from kv_pool import BlockPool, InvalidArgumentError, InvalidBlockError
from kv_pool.core import invariants

PICTURE = "free: 3 1* | in use: 2* 4 5"


def test_a_held_block_keeps_its_id_until_the_hold_is_released():
    pool = make_pool(PICTURE)
    hold = pool.hold(blocks(pool, 4), "read by a network card")
    with pytest.raises(InvalidBlockError, match="block 4 is read by a network card: it cannot be moved"):
        pool.swap_block_ids([(2, 1), (4, 3)])
    assert [block.block_id for block in pool.blocks] == list(range(6))
    with pytest.raises(InvalidBlockError, match="block 4"):
        pool.swap_block_ids([(3, 4)])
    hold.release()
    pool.swap_block_ids([(4, 3)])
    assert state(pool) == "free: 4 1* | in use: 2* 3 5"


def test_a_block_that_is_held_twice_stays_until_both_are_released():
    pool = make_pool(PICTURE)
    first = pool.hold(blocks(pool, 4, 5), "first")
    second = pool.hold(blocks(pool, 4), "second")
    assert pool.holds.list_ids() == [4, 5, 4]
    assert pool.holds.list_reasons(pool.blocks[4]) == ["first", "second"]
    assert pool.holds.list_holds() == [first, second]
    first.release()
    assert pool.holds.list_reasons(pool.blocks[4]) == ["second"]
    assert pool.holds.list_reasons(pool.blocks[5]) == []
    second.release()
    assert pool.holds.list_ids() == []


def test_a_hold_ends_once():
    pool = make_pool(PICTURE)
    with pool.hold(blocks(pool, 4), "copied") as hold:
        assert not hold.is_released
    assert hold.is_released
    with pytest.raises(InvalidArgumentError, match=r"Hold\('copied', 1 blocks\) was released before"):
        hold.release()
    with pytest.raises(InvalidArgumentError, match="was released before"):
        hold.add(blocks(pool, 5))
    assert pool.holds.list_holds() == []


def test_only_blocks_in_use_of_this_pool_are_held():
    pool, other = make_pool(PICTURE), BlockPool(4, True, 4)
    hold = pool.hold([], "pinned")
    for wrong, said in ((pool.blocks[3], "block 3 is free"), (other.blocks[1], "block 1 is not one of this")):
        with pytest.raises(InvalidBlockError, match=said):
            pool.hold([pool.blocks[4], wrong], "read")
        with pytest.raises(InvalidBlockError, match=said):
            hold.add([pool.blocks[4], wrong])
    assert pool.holds.list_ids() == []
    assert pool.holds.list_holds() == [hold]


def test_null_blocks_and_repeated_ones_are_passed_over():
    pool = make_pool(PICTURE)
    hold = pool.hold([pool.null_block, *blocks(pool, 4, 5, 4)], "of a table")
    assert hold.blocks == blocks(pool, 4, 5)
    hold.remove(blocks(pool, 4, 2))
    assert hold.blocks == blocks(pool, 5)


@pytest.mark.parametrize("seed", range(20))
def test_random_holds_are_the_slow_model(seed):
    draw = random.Random(seed)
    pool = BlockPool(20, True, 4)
    taken = pool.get_new_blocks(12)
    open_holds = {}
    for number in range(200):
        some = draw.sample(taken, draw.randint(0, 5))
        match draw.choice(["hold", "add", "remove", "release", "swap"]):
            case "hold":
                open_holds[pool.hold(some, f"held {number}")] = set(some)
            case "add" if open_holds:
                hold = draw.choice(list(open_holds))
                hold.add(some)
                open_holds[hold] |= set(some)
            case "remove" if open_holds:
                hold = draw.choice(list(open_holds))
                hold.remove(some)
                open_holds[hold] -= set(some)
            case "release" if open_holds:
                hold = draw.choice(list(open_holds))
                hold.release()
                del open_holds[hold]
            case "swap":
                first, second = draw.sample(range(1, 20), 2)
                pair = {pool.blocks[first], pool.blocks[second]}
                if any(held & pair for held in open_holds.values()):
                    with pytest.raises(InvalidBlockError):
                        pool.swap_block_ids([(first, second)])
                else:
                    pool.swap_block_ids([(first, second)])
        invariants.check(pool)
        expected = Counter(block.block_id for held in open_holds.values() for block in held)
        assert Counter(pool.holds.list_ids()) == expected
        for block in taken:
            reasons = [hold.reason for hold, held in open_holds.items() if block in held]
            assert pool.holds.list_reasons(block) == reasons
