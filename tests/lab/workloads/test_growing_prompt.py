"""Prompts grow as a slow model of their tokens says: equal ids if and only if equal prefixes."""

import random
from itertools import count

import pytest

from kv_pool.lab.workloads.workload import GrowingPrompt


@pytest.mark.parametrize("seed", range(10))
def test_ids_are_those_of_equal_prefixes(seed):
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 7])
    shared_length = rng.randrange(30)
    fresh = count(shared_length // block_size)
    prompts = []
    for number in range(6):
        prompt = GrowingPrompt(fresh, block_size)
        tokens = []
        if rng.random() < 0.7:
            prompt.append_shared(shared_length, 0)
            tokens = ["shared"] * shared_length
        prompts.append((number, prompt, tokens))
    ids = {}
    for step in range(60):
        number, prompt, tokens = rng.choice(prompts)
        num_new = rng.randrange(12)
        before = list(prompt.ids)
        prompt.append_own(num_new)
        tokens += [(number, step)] * num_new
        assert prompt.ids[: len(before)] == before
        assert prompt.num_tokens == len(tokens)
        ends = range(block_size, len(tokens) + 1, block_size)
        assert len(prompt.ids) == len(ends)
        for hash_id, end in zip(prompt.ids, ends, strict=True):
            assert ids.setdefault(hash_id, tokens[:end]) == tokens[:end]
    assert len({tuple(tokens) for tokens in ids.values()}) == len(ids)


@pytest.mark.parametrize(("num_tokens", "num_after"), [(2, 7), (5, 10), (6, 10), (0, 6)])
def test_own_text_is_cut_to_the_maximum_length(num_tokens, num_after):
    prompt = GrowingPrompt(count(), 4)
    prompt.append_own(5)
    prompt.append_own_within(num_tokens, 10)
    assert (prompt.num_tokens, len(prompt.ids)) == (num_after, num_after // 4)


def test_own_text_of_a_full_prompt_is_one_token():
    prompt = GrowingPrompt(count(), 4)
    prompt.append_own(10)
    prompt.append_own_within(3, 10)
    assert prompt.num_tokens == 11
