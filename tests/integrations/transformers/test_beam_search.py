"""Beam search over the pool's blocks gives the same result as with transformers' own cache."""

import pytest
from integrations.transformers.made_model import make_model, make_request, make_sequences

from kv_pool import InvalidArgumentError, OutOfBlocksError

pytestmark = pytest.mark.transformers


def search(prompts, num_tokens, cache=None, **options):
    """Return (token ids, scores) of the best beams."""
    import torch

    input_ids = torch.tensor(prompts)
    found = make_model().generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=num_tokens,
        cache=cache,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return found.sequences.tolist(), found.sequences_scores.tolist()


def prompts_of(length, num_prompts=1):
    return [[(7 * row + 3 * place) % 97 for place in range(length)] for row in range(num_prompts)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 21])
@pytest.mark.parametrize(
    ("num_beams", "options"),
    [
        (3, {}),
        (3, {"num_return_sequences": 3, "early_stopping": True, "eos_token_id": 5, "pad_token_id": 0}),
        (2, {"length_penalty": 2.0}),
    ],
)
def test_beam_search_matches_transformers(length, num_beams, options):
    from kv_pool.integrations.transformers import PagedCache

    prompts = prompts_of(length, 2)
    expected = search(prompts, 11, num_beams=num_beams, **options)
    sequences = make_sequences()
    num_free = sequences.manager.get_num_free_blocks()
    requests = [make_request(str(row), prompt) for row, prompt in enumerate(prompts)]
    for request in requests:
        sequences.admit(request)
    cache = PagedCache(sequences, requests, num_beams=num_beams)
    found = search(prompts, 11, cache, num_beams=num_beams, **options)
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1])
    cache.free()
    assert sequences.manager.get_num_free_blocks() == num_free
    assert len(sequences.manager.take_block_copies()) == 0


def test_beams_share_prompt_blocks_and_write_to_their_own():
    from kv_pool.integrations.transformers import PagedCache

    [prompt] = prompts_of(22)  # 5 full blocks, and 2 tokens in the last
    sequences = make_sequences()
    request = make_request("r", prompt)
    sequences.admit(request)
    cache = PagedCache(sequences, [request], num_beams=3)
    search([prompt], 6, cache, num_beams=3)
    tables = [sequences.manager.get_block_ids(beam.request_id) for beam in cache.requests]
    assert len({tuple(table[:5]) for table in tables}) == 1
    # 27 computed tokens. Beams that have diverged have different blocks.
    assert all(len(table) == 7 for table in tables)
    num_used = len({block_id for table in tables for block_id in table})
    assert num_used <= 5 + 2 * 3
    assert sequences.manager.get_num_free_blocks() == 39 - num_used


def test_full_pool_raises_an_error_and_all_blocks_are_freed():
    from kv_pool.integrations.transformers import PagedCache

    [prompt] = prompts_of(9)
    sequences = make_sequences(num_blocks=8)
    request = make_request("r", prompt)
    sequences.admit(request)
    cache = PagedCache(sequences, [request], num_beams=3)
    with pytest.raises(OutOfBlocksError):
        search([prompt], 20, cache, num_beams=3)
    cache.free()
    assert sequences.manager.get_num_free_blocks() == 7


def test_invalid_beams_are_rejected():
    import torch

    from kv_pool.integrations.transformers import PagedCache

    sequences = make_sequences()
    requests = [make_request(name, prompts_of(5)[0]) for name in "ab"]
    for request in requests:
        sequences.admit(request)
    with pytest.raises(InvalidArgumentError, match="num_beams is 0"):
        PagedCache(sequences, requests, num_beams=0)
    with pytest.raises(InvalidArgumentError, match="and 1 with num_new_tokens"):
        PagedCache(sequences, requests, [5, 5], num_beams=2)
    cache = PagedCache(sequences, requests, num_beams=2)
    with pytest.raises(InvalidArgumentError, match="mix the beams of 2 requests"):
        cache.reorder_cache(torch.tensor([0, 1, 1, 2]))
    with pytest.raises(InvalidArgumentError, match="mix the beams"):
        cache.reorder_cache(torch.tensor([0, 1]))
