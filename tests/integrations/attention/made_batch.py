"""Sequences in random blocks of a storage filled with NaN elsewhere, and the same K and V dense."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from kv_pool.manager.slot_mapping import list_slots
from kv_pool.storage import KVStorage


@dataclass
class MadeBatch:
    """A batch with K and V in layer 1 of the storage; tables are padded with -1."""

    storage: KVStorage
    query: Any
    tables: Any
    seq_lens: list[int]
    query_lens: list[int]
    dense: list[tuple[Any, Any]]

    def attend(self, **options):
        from kv_pool.integrations.attention import paged_attention

        starts = np.cumsum([0, *self.query_lens])
        caches = self.storage.get_caches(1)
        return paged_attention(self.query, *caches, self.tables, self.seq_lens, starts, **options)


def make_batch(
    seq_lens,
    query_lens,
    num_heads,
    *,
    head_size=8,
    block_size=4,
    dtype="float64",
    device="cpu",
    layout="NHD",
    seed=3,
):
    """num_heads: (query heads, KV heads)."""
    import torch

    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(device=device, dtype=getattr(torch, dtype))

    num_query_heads, num_kv_heads = num_heads
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(counts) + 4
    storage = KVStorage.allocate(
        num_blocks, block_size, 2, num_kv_heads, head_size, dtype, device, layout, library="torch"
    )
    for tensor in storage.tensors:
        tensor.fill_(float("nan"))  # slots that no token wrote must not be read
    free = list(range(1, num_blocks))
    rng.shuffle(free)
    tables = np.full((len(seq_lens), max(counts) + 1), -1, np.int32)
    dense = []
    for row, length, count in zip(tables, seq_lens, counts, strict=True):
        row[:count], free = free[:count], free[count:]
        dense.append((draw(length, num_kv_heads, head_size), draw(length, num_kv_heads, head_size)))
        storage.write(1, list_slots(row, 0, length, block_size), *dense[-1])
    query = draw(sum(query_lens), num_query_heads, head_size)
    return MadeBatch(storage, query, tables, seq_lens, query_lens, dense)


def attend_dense(query, key, value, scale=None, window=None):
    """Compute dense attention of one sequence, in the dtype of the query."""
    import torch

    group = query.shape[1] // key.shape[1]
    key, value = (found.repeat_interleave(group, 1).transpose(0, 1) for found in (key, value))
    num_queries, num_keys = len(query), key.shape[1]
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    if window is not None:
        seen = seen.triu(num_keys - num_queries - window + 1)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key, value, attn_mask=seen.to(query.device), scale=scale
    )
    return attended.transpose(0, 1)


def check(batch, found, tolerance, scale=None, window=None):
    """Check that the result of each sequence equals dense attention."""
    import torch

    assert (found.shape, found.dtype, found.device) == (
        batch.query.shape,
        batch.query.dtype,
        batch.query.device,
    )
    parts = (tensor.split(batch.query_lens) for tensor in (found, batch.query))
    for some, query, (key, value) in zip(*parts, batch.dense, strict=True):
        expected = attend_dense(query, key, value, scale, window)
        torch.testing.assert_close(some, expected, rtol=tolerance, atol=tolerance)
