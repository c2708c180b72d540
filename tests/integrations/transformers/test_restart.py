"""A model in another process continues from blocks cached in this one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.transformers

TESTS = Path(__file__).parent.parent.parent
PROMPTS = [tuple(range(30)), (*range(20), *range(60, 75)), (*range(30), 5, 6, 7)]
NUM_TOKENS = 12

SECOND_LIFE = """
import json, sys
from integrations.transformers.test_restart import generate, make_layout, make_sequences
from kv_pool.core import invariants
from kv_pool.tiers.pool_dump import load_pool

path, num_blocks, prompts = json.loads(sys.argv[1])
sequences = make_sequences(num_blocks)
load_pool(path, sequences.manager.block_pool, storage=sequences.storage, layout=make_layout(sequences))
invariants.check(sequences.manager.block_pool)
print(json.dumps([generate(sequences, f"again {i}", prompt) for i, prompt in enumerate(prompts)]))
"""


def make_sequences(num_blocks):
    from integrations.transformers.made_model import BLOCK_SIZE, make_model

    from kv_pool import BlockPool, KVCacheManager
    from kv_pool.integrations.transformers import PagedSequences, allocate_storage

    pool = BlockPool(num_blocks, True, BLOCK_SIZE)
    return PagedSequences(KVCacheManager(pool), allocate_storage(make_model(), num_blocks, BLOCK_SIZE))


def make_layout(sequences):
    from integrations.transformers.made_model import BLOCK_SIZE, HASHER

    from kv_pool.storage.block_layout import BlockLayout

    return BlockLayout.describe(sequences.storage, BLOCK_SIZE, HASHER)


def generate(sequences, name, prompt):
    """Return the number of cached tokens, and the generated tokens."""
    import torch
    from integrations.transformers.made_model import make_model, make_request

    from kv_pool.integrations.transformers import PagedCache

    request = make_request(name, prompt)
    num_cached = sequences.admit(request)
    input_ids = torch.tensor([request.all_token_ids])
    output = make_model().generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        cache=PagedCache(sequences, [request]),
        max_new_tokens=NUM_TOKENS,
    )
    generated = output[0, len(prompt) :].tolist()
    request.append_output_token_ids(generated)
    sequences.note_computed(request, request.num_computed_tokens)
    sequences.free(request)
    return num_cached, generated


@pytest.mark.parametrize("num_blocks", [40, 25])
def test_another_process_generates_from_blocks_cached_here(num_blocks, tmp_path):
    from integrations.transformers.made_model import generate_dense

    from kv_pool.tiers.pool_dump import dump_pool

    sequences = make_sequences(40)
    first = [generate(sequences, f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    assert first[0][0] == 0
    dump_pool(
        tmp_path / "pool",
        sequences.manager.block_pool,
        storage=sequences.storage,
        layout=make_layout(sequences),
    )
    told = subprocess.run(
        [sys.executable, "-c", SECOND_LIFE, json.dumps([str(tmp_path / "pool"), num_blocks, PROMPTS])],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    second = json.loads(told.stdout)
    for prompt, (_, before), (num_cached, after) in zip(PROMPTS, first, second, strict=True):
        assert before == after == generate_dense(prompt, NUM_TOKENS)
        assert num_cached == (len(prompt) - 1) // 4 * 4  # all full blocks except the last token
