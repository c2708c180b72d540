"""Tests of `PromptSteps`."""

import pytest

from kv_pool import InvalidArgumentError
from kv_pool.lab.groups import PromptSteps, parse_groups


def list_steps(steps, start, end):
    lengths = []
    while start < end:
        lengths.append(steps.count_next(start, end))
        start += lengths[-1]
    return lengths


@pytest.mark.parametrize(
    ("max_tokens", "end_at", "lengths"),
    [
        (None, 1, [38]),
        (16, 1, [16, 16, 6]),
        (None, 4, [36, 2]),
        (16, 4, [16, 16, 4, 2]),
        (18, 4, [16, 16, 4, 2]),
    ],
)
def test_steps_end_at_limits_and_at_the_prompt_end(max_tokens, end_at, lengths):
    assert list_steps(PromptSteps(max_tokens, end_at), 12, 50) == lengths
    assert PromptSteps(max_tokens, end_at).count_next(48, 48) == 0, "a prompt that is hit wholly"


@pytest.mark.parametrize(("groups", "end_at"), [("full", 1), ("full,window:9", 1), ("full,mamba", 8)])
def test_only_state_groups_align_steps(groups, end_at):
    assert PromptSteps.for_groups(parse_groups(groups, 8), 64) == PromptSteps(64, end_at)


@pytest.mark.parametrize(("max_tokens", "end_at"), [(0, 1), (-1, 1), (7, 8)])
def test_step_shorter_than_a_block_is_refused(max_tokens, end_at):
    with pytest.raises(InvalidArgumentError, match=f"a step of {max_tokens} prompt tokens is too short"):
        PromptSteps(max_tokens, end_at)
