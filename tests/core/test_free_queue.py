import gc
import random

import pytest

from kv_pool import (
    CorruptedPoolError,
    FreeKVCacheBlockQueue,
    InvalidArgumentError,
    InvalidBlockError,
    KVCacheBlock,
)
from kv_pool.core.invariants import check_free_queue


def make_queue(num_blocks):
    made = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
    return made, FreeKVCacheBlockQueue(made)


def order(queue):
    check_free_queue(queue)
    return [block.block_id for block in queue.get_all_free_blocks()]


def is_unlinked(block):
    return block.prev_free_block is None and block.next_free_block is None


def test_popleft_detects_a_wrong_counter():
    queue = FreeKVCacheBlockQueue([])
    queue.num_free_blocks = 2
    with pytest.raises(AssertionError, match="out of sync"):
        queue.popleft()
    queue.append(KVCacheBlock(0))  # the links are as before


def test_popleft_detects_a_missing_link():
    made, queue = make_queue(2)
    made[0].next_free_block = None
    with pytest.raises(RuntimeError, match="next_free_block=None"):
        queue.popleft()
    assert made[0].prev_free_block is queue.fake_free_list_head


@pytest.mark.parametrize("n", [-1, 3])
def test_popleft_n_of_an_invalid_count_changes_nothing(n):
    _, queue = make_queue(2)
    with pytest.raises(InvalidArgumentError, match=f"asked for {n} blocks, 2 are in the free queue"):
        queue.popleft_n(n)
    assert order(queue) == [0, 1]


@pytest.mark.parametrize("too_many", [1, 2, 3])
def test_popleft_n_past_the_tail_is_found(too_many):
    _, queue = make_queue(2)
    queue.num_free_blocks += too_many
    with pytest.raises(CorruptedPoolError, match=f"num_free_blocks is {2 + too_many} but fewer blocks are"):
        queue.popleft_n(2 + too_many)


def test_remove_of_an_unlinked_block_changes_nothing():
    _, queue = make_queue(2)
    with pytest.raises(InvalidBlockError, match="block 9 is not in the free queue"):
        queue.remove(KVCacheBlock(9))
    assert order(queue) == [0, 1]


def test_appending_to_a_queue_without_tail_changes_nothing():
    _, queue = make_queue(1)
    queue.fake_free_list_tail.prev_free_block = None
    with pytest.raises(RuntimeError):
        queue.append(KVCacheBlock(5))
    with pytest.raises(AssertionError):
        queue.append_n([KVCacheBlock(5)])
    queue.append_n([])
    assert queue.num_free_blocks == 1


def test_prepending_to_a_queue_without_head_changes_nothing():
    _, queue = make_queue(1)
    queue.fake_free_list_head.next_free_block = None
    with pytest.raises(AssertionError):
        queue.prepend_n([KVCacheBlock(5)])
    assert queue.num_free_blocks == 1


def test_listing_a_broken_queue_raises():
    made, queue = make_queue(3)
    made[1].next_free_block = None
    with pytest.raises(RuntimeError, match="a link is missing in the free queue after 2 blocks"):
        queue.get_all_free_blocks()


def test_iteration_sees_changes_ahead_of_it():
    made, queue = make_queue(3)
    walk = queue.iter_blocks_after(None)
    assert next(walk) is made[0]
    queue.append(KVCacheBlock(9))
    assert [block.block_id for block in walk] == [1, 2, 9]


def test_a_dropped_queue_releases_its_blocks():
    made, queue = make_queue(3)
    queue.remove(made[1])
    del queue
    assert all(is_unlinked(block) for block in made)


def test_a_dropped_queue_keeps_a_newer_queue_intact():
    made, queue = make_queue(3)
    younger = FreeKVCacheBlockQueue(made)
    del queue
    gc.collect()
    assert order(younger) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_agree_with_a_list(seed):
    rng = random.Random(seed)
    made, queue = make_queue(rng.randrange(1, 12))
    model = list(made)
    out = []
    for _ in range(200):
        call = rng.choice(["popleft", "popleft_n", "remove", "append", "append_n", "prepend_n"])
        some = [out.pop() for _ in range(rng.randrange(3)) if out]
        if call == "popleft" and model:
            out.append(queue.popleft())
            assert out[-1] is model.pop(0)
        elif call == "popleft_n":
            n = rng.randrange(len(model) + 1)
            taken = queue.popleft_n(n)
            assert taken == model[:n]
            del model[:n]
            out += taken
        elif call == "remove" and model:
            block = model.pop(rng.randrange(len(model)))
            queue.remove(block)
            out.append(block)
        elif call == "append" and out:
            model.append(out.pop())
            queue.append(model[-1])
        elif call == "append_n":
            queue.append_n(some)
            model += some
            some = []
        elif call == "prepend_n":
            queue.prepend_n(some)
            model[:0] = some
            some = []
        out += some
        assert order(queue) == [block.block_id for block in model]
        assert all(is_unlinked(block) for block in out)


@pytest.mark.parametrize("call", ["append_n", "prepend_n"])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("wrong", [None, 7, "block"])
def test_an_element_that_is_not_a_block_links_nothing(call, position, wrong):
    _, queue = make_queue(2)
    listed = [KVCacheBlock(5), KVCacheBlock(6)]
    fresh = list(listed)
    listed.insert(position, wrong)
    with pytest.raises(TypeError):
        getattr(queue, call)(listed)
    assert order(queue) == [0, 1]
    assert queue.num_free_blocks == 2
    assert all(is_unlinked(block) for block in fresh)


def test_a_queue_whose_constructor_failed_can_be_dropped():
    """A bug: a compiled destructor runs even if the constructor did not, and read unset attributes."""
    for arguments in ((), (None,), ([1],), ([KVCacheBlock(1), None],), ([], [])):
        with pytest.raises(TypeError):
            FreeKVCacheBlockQueue(*arguments)
    gc.collect()
