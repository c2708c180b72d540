"""Block counts of tokens, and the case in which they differ from the formulas of vLLM v0."""

import math

import pytest

from kv_pool import InvalidArgumentError
from kv_pool.integrations.block_space_manager import count_blocks_touched_by_append, count_required_blocks

COUNTS = [
    (held, new, lookahead, block_size)
    for block_size in (1, 2, 4, 7)
    for held in range(18)
    for new in range(18)
    for lookahead in (0, 1, 4, 5)
]


def test_touched_blocks_are_those_with_appended_positions():
    for held, new, lookahead, block_size in COUNTS:
        touched = {position // block_size for position in range(held, held + new + lookahead)}
        assert count_blocks_touched_by_append(held, new, lookahead, block_size) == len(touched)


def test_required_blocks_are_those_with_positions():
    for _, new, lookahead, block_size in COUNTS:
        required = {position // block_size for position in range(new + lookahead)}
        assert count_required_blocks(new, lookahead, block_size) == len(required)


def vllm_v0_touched(held, new, lookahead, block_size):
    num_token_ids = new + lookahead
    first_chunk_size = block_size - held % block_size
    return 1 + math.ceil((num_token_ids - first_chunk_size) / block_size)


def test_only_an_empty_append_differs_from_vllm_v0():
    differing = [
        (held, new, lookahead, block_size)
        for held, new, lookahead, block_size in COUNTS
        if count_blocks_touched_by_append(held, new, lookahead, block_size)
        != vllm_v0_touched(held, new, lookahead, block_size)
    ]
    assert differing == [counts for counts in COUNTS if counts[1] + counts[2] == 0 and counts[0] % counts[3]]


@pytest.mark.parametrize("counts", [(-1, 0, 4), (0, -1, 4), (3, 0, 0)])
def test_invalid_counts_are_refused(counts):
    with pytest.raises(InvalidArgumentError):
        count_required_blocks(*counts)
    with pytest.raises(InvalidArgumentError):
        count_blocks_touched_by_append(4, *counts)
    with pytest.raises(InvalidArgumentError):
        count_blocks_touched_by_append(-1, 1, 0, 4)
