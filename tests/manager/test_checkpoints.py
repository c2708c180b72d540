"""`choose_checkpoint`: the second position at which a prompt's states are kept."""

import random

import pytest

from kv_pool.manager.checkpoints import NO_CHECKPOINT, choose_checkpoint


def test_a_shared_prefix_without_a_state_gets_one_at_its_end():
    assert choose_checkpoint(0, 1056, 2112, 528) == 1056
    assert choose_checkpoint(528, 1584, 2112, 528) == 1584


def test_a_junction_is_floored_to_the_alignment():
    assert choose_checkpoint(0, 1100, 2112, 528) == 1056
    assert choose_checkpoint(1056, 1100, 2112, 528) == NO_CHECKPOINT


def test_a_new_prompt_gets_one_in_its_middle():
    assert choose_checkpoint(0, 0, 2112, 528) == 1056
    assert choose_checkpoint(0, 0, 1584, 528) == 528


def test_a_prompt_that_mostly_continues_a_hit_gets_none():
    assert choose_checkpoint(1056, 1056, 2112, 528) == NO_CHECKPOINT
    assert choose_checkpoint(528, 528, 2112, 528) == 1056


@pytest.mark.parametrize("end", [0, 528])
def test_a_prompt_without_a_block_end_before_its_last_gets_none(end):
    assert choose_checkpoint(0, 0, end, 528) == NO_CHECKPOINT


@pytest.mark.parametrize("seed", range(20))
def test_the_position_is_aligned_and_after_the_hit(seed):
    rng = random.Random(seed)
    for _ in range(200):
        alignment = rng.choice([1, 4, 16, 528])
        end = rng.randrange(50) * alignment
        num_hit = min(end, rng.randrange(50) * alignment)
        num_shared = rng.randint(num_hit, max(num_hit, end))
        chosen = choose_checkpoint(num_hit, num_shared, end, alignment)
        assert chosen % alignment == 0
        assert chosen == NO_CHECKPOINT or num_hit < chosen <= end
        if num_shared >= num_hit + alignment:
            assert num_shared - alignment < chosen <= num_shared
        elif num_shared == num_hit and end - num_hit > max(num_hit, alignment):
            assert chosen - num_hit <= (end - num_hit) / 2 < chosen - num_hit + alignment
