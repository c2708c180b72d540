"""Attention over blocks against torch's attention over dense tensors."""

import random

import pytest

from kv_pool import InvalidArgumentError
from kv_pool.storage import KVStorage

pytestmark = pytest.mark.transformers

BLOCK_SIZE, HEAD_SIZE = 4, 8
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def make_blocks(context_lens, num_kv_heads, dtype, device, layout, seed):
    """A storage full of noise, tables of random blocks, and dense K and V of each sequence."""
    import torch

    from kv_pool.manager.positions import list_slots

    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    storage = KVStorage.allocate(
        40, BLOCK_SIZE, 2, num_kv_heads, HEAD_SIZE, dtype, device, layout, library="torch"
    )
    for tensor in storage.tensors:
        tensor.fill_(float("nan"))  # what no token wrote must not be read
    free = list(range(1, 40))
    rng.shuffle(free)
    tables, dense = [], []
    for context_len in context_lens:
        tables.append([free.pop() for _ in range(-(-context_len // BLOCK_SIZE))])
        key, value = (
            torch.randn(context_len, num_kv_heads, HEAD_SIZE, generator=generator, dtype=torch.float64).to(
                device=device, dtype=getattr(torch, dtype)
            )
            for _ in range(2)
        )
        storage.write(1, list_slots(tables[-1], 0, context_len, BLOCK_SIZE), key, value)
        dense.append((key, value))
    return storage, tables, dense


def attend_dense(query, key, value, scale):
    import torch

    group = query.shape[1] // key.shape[1]
    key, value = (found.repeat_interleave(group, 1).transpose(0, 1) for found in (key, value))
    num_queries, num_keys = len(query), key.shape[1]
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries).to(query.device)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key, value, attn_mask=seen, scale=scale
    )
    return attended.transpose(0, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND", "FLASH", "SGLANG", "TRTLLM"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("num_heads", [(2, 2), (8, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
def test_it_equals_dense_attention(kind, num_heads, dtype, tolerance, layout, device):
    import torch

    from kv_pool.integrations.transformers import paged_attention

    num_query_heads, num_kv_heads = num_heads
    context_lens = [1, 9, 16, 30]
    storage, tables, dense = make_blocks(context_lens, num_kv_heads, dtype, device, layout, seed=3)
    query_lens = {"decode": None, "prefill": context_lens, "mixed": [1, 3, 16, 1]}[kind]
    counts = query_lens or [1] * 4
    query = torch.randn(sum(counts), num_query_heads, HEAD_SIZE, dtype=torch.float64)
    query = query.to(device=device, dtype=getattr(torch, dtype))
    scale = None if kind != "mixed" else 0.7
    found = paged_attention(query, storage, 1, tables, context_lens, query_lens, scale=scale)
    assert (found.shape, found.dtype, found.device) == (query.shape, query.dtype, query.device)
    for some, expected_from, kv in zip(found.split(counts), query.split(counts), dense, strict=True):
        expected = attend_dense(expected_from, *kv, scale)
        torch.testing.assert_close(some, expected, rtol=tolerance, atol=tolerance)


def test_tables_may_be_one_padded_array():
    import numpy as np
    import torch

    from kv_pool.integrations.transformers import paged_attention

    storage, tables, _ = make_blocks([3, 9], 2, "float64", "cpu", "NHD", seed=0)
    padded = np.zeros((2, 5), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    query = torch.randn(2, 4, HEAD_SIZE, dtype=torch.float64)
    expected = paged_attention(query, storage, 1, tables, [3, 9])
    assert torch.equal(paged_attention(query, storage, 1, padded, [3, 9]), expected)


def test_what_does_not_fit_is_refused():
    import torch

    from kv_pool.integrations.transformers import paged_attention

    storage, tables, _ = make_blocks([3, 9], 2, "float64", "cpu", "NHD", seed=0)
    query = torch.zeros(2, 4, HEAD_SIZE, dtype=torch.float64)
    with pytest.raises(InvalidArgumentError, match="one of each"):
        paged_attention(query, storage, 1, tables, [3])
    with pytest.raises(InvalidArgumentError, match="4 tokens in a context of 3"):
        paged_attention(query, storage, 1, tables, [3, 9], [4, 1])
    with pytest.raises(InvalidArgumentError, match="3 tokens of query_lens"):
        paged_attention(query, storage, 1, tables, [3, 9], [1, 2])
    with pytest.raises(InvalidArgumentError, match="3 query heads"):
        paged_attention(query[:, :3], storage, 1, tables, [3, 9])
    with pytest.raises(InvalidArgumentError, match="not in a table"):
        paged_attention(query, storage, 1, tables, [3, 13])
    latent = KVStorage.allocate(4, 4, 2, 1, HEAD_SIZE, "float64", layout="MLA", library="torch")
    with pytest.raises(InvalidArgumentError, match="no values"):
        paged_attention(query, latent, 0, [[1], [2]], [1, 1])
