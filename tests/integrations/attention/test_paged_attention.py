"""Attention over blocks against torch's attention over dense tensors."""

import random

import numpy as np
import pytest
from integrations.attention.made_batch import attend_dense, check, make_batch

from kv_pool import InvalidArgumentError, InvalidBlockError

pytestmark = pytest.mark.torch

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
LAYOUTS = ["NHD", "HND", "FLASH", "SGLANG", "TRTLLM", "LHBNC", "BHLNC", "LB2NHD"]


@pytest.fixture
def _small_pieces(monkeypatch):
    """Make chunks and tiles so small that sequences of a few tokens have several."""
    from kv_pool.integrations.attention import gathered_attention

    monkeypatch.setattr(gathered_attention, "TILE_TOKENS", 8)
    monkeypatch.setattr(gathered_attention, "CHUNK_ELEMENTS", 512)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 1e-2)]
)
@pytest.mark.parametrize("num_heads", [(2, 2), (8, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
def test_it_equals_dense_attention(kind, num_heads, dtype, tolerance, layout, device):
    seq_lens = [1, 9, 16, 30]
    query_lens = {"decode": [1] * 4, "prefill": seq_lens, "mixed": [1, 3, 16, 1]}[kind]
    batch = make_batch(seq_lens, query_lens, num_heads, dtype=dtype, device=device, layout=layout)
    check(
        batch,
        batch.attend(scale=None if kind != "mixed" else 0.7),
        tolerance,
        0.7 if kind == "mixed" else None,
    )


@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(s, marks=pytest.mark.slow) for s in range(20, 400))]
)
def test_batches_of_any_shape_equal_dense_attention(seed):
    rng = random.Random(seed)
    num_kv_heads = rng.randint(1, 3)
    seq_lens = [rng.randint(1, rng.choice([5, 60, 150])) for _ in range(rng.randint(1, 6))]
    query_lens = [rng.choice([0, 1, 1, length, rng.randint(1, length)]) for length in seq_lens]
    window = rng.choice([None, None, 1, 7, 30])
    batch = make_batch(
        seq_lens,
        query_lens,
        (num_kv_heads * rng.randint(1, 4), num_kv_heads),
        head_size=rng.choice([8, 20]),
        block_size=rng.choice([1, 3, 4, 16]),
        layout=rng.choice(LAYOUTS),
        seed=seed,
    )
    check(batch, batch.attend(sliding_window=window), 1e-11, window=window)


def test_results_of_chunks_are_merged_on_the_way(monkeypatch):
    """All were kept to the end: 3 GiB for 256 query tokens of a context of 64,000."""
    from kv_pool.integrations.attention import gathered_attention

    monkeypatch.setattr(gathered_attention, "CHUNK_ELEMENTS", 512)
    merge, num_parts = gathered_attention._merge, []

    def count(parts):
        num_parts.append(len(parts))
        return merge(parts)

    monkeypatch.setattr(gathered_attention, "_merge", count)
    batch = make_batch([3000, 2900], [600, 1], (4, 2), block_size=16)
    check(batch, batch.attend(), 1e-11)
    assert len(num_parts) > 30
    assert max(num_parts) == gathered_attention.MAX_PARTS


def test_half_precision_of_long_sequences_is_accurate():
    batch = make_batch([2500, 40], [1, 1], (4, 2), block_size=16, dtype="bfloat16")
    check(batch, batch.attend(), 2e-2)


def test_blocks_before_the_window_are_not_read():
    batch = make_batch([30, 30], [1, 3], (2, 2))
    expected = batch.attend(sliding_window=5)
    batch.tables[:, :5] = -1  # 20 tokens; the first query token attends to token 23 and later ones
    np.testing.assert_array_equal(batch.attend(sliding_window=5), expected)


def test_tables_and_lengths_may_be_lists_arrays_or_tensors():
    import torch

    from kv_pool.integrations.attention import paged_attention

    batch = make_batch([3, 9], [1, 1], (4, 2))
    expected = batch.attend()
    for convert in (np.ndarray.tolist, lambda array: array, torch.from_numpy):
        tables = convert(np.maximum(batch.tables, 0))
        seq_lens = convert(np.array(batch.seq_lens, np.int32))
        found = paged_attention(batch.query, *batch.storage.get_caches(1), tables, seq_lens)
        assert torch.equal(found, expected)


def test_no_query_tokens_give_an_empty_result():
    batch = make_batch([3, 9], [0, 0], (4, 2))
    assert batch.attend().shape == (0, 4, 8)


def test_wrapped_engine_memory_is_read_in_place():
    import torch

    from kv_pool.integrations.attention import paged_attention
    from kv_pool.storage import KVStorage

    # One layer of a larger tensor, and padding behind each block.
    memory = torch.randn(12, 3, 4, 2, 16, dtype=torch.float64)
    layers = [memory[:10, layer, :, :, :16] for layer in range(3)]
    storage = KVStorage.wrap(layers, "NHD")
    for layer in range(3):
        key, value = storage.get_caches(layer)
        assert key.data_ptr() == layers[layer].data_ptr()
        assert torch.equal(torch.cat([key, value], -1), layers[layer])
        query = torch.randn(1, 2, 8, dtype=torch.float64)
        found = paged_attention(query, key, value, [[7, 2]], [6])
        expected = attend_dense(query, key[[7, 2]].flatten(0, 1)[:6], value[[7, 2]].flatten(0, 1)[:6])
        torch.testing.assert_close(found, expected)


def test_mismatched_arguments_are_refused():
    import torch

    from kv_pool.integrations.attention import paged_attention
    from kv_pool.storage import KVStorage

    batch = make_batch([3, 9], [1, 1], (4, 2))
    caches = batch.storage.get_caches(1)
    tables, query = batch.tables, batch.query

    def refuse(match, *arguments, error=InvalidArgumentError, **options):
        with pytest.raises(error, match=match):
            paged_attention(*arguments, **options)

    refuse("a row and a length", query, *caches, tables, [3])
    refuse("4 query tokens and a length of 3", query.repeat(3, 1, 1), *caches, tables, [3, 9], [0, 4, 6])
    refuse("must go from 0 to the 2 tokens", query, *caches, tables, [3, 9], [0, 1, 3])
    refuse("3 query heads", query[:, :3], *caches, tables, [3, 9])
    refuse("too many for a table", query, *caches, tables, [3, 20])
    refuse("rows of block_tables differ in length", query, *caches, [[1], [2, 3]], [3, 9])
    refuse("must be integers", query, *caches, tables, [3.0, 9.0])
    refuse("one floating-point type", query.float(), *caches, tables, [3, 9])
    refuse("sliding_window is 0", query, *caches, tables, [3, 9], sliding_window=0)
    refuse("query has shape", query[0], *caches, tables, [3, 9])
    apart = [cache.repeat_interleave(2, 3)[..., ::2] for cache in caches]
    refuse("have strides 2 and 2, not 1", query, *apart, tables, [3, 9])
    outside = np.where(tables == tables[1, 1], 40, tables)
    refuse("sequence 1 has block 40", query, *caches, outside, [3, 9], error=InvalidBlockError)
    latent = KVStorage.allocate(4, 4, 2, 1, 8, "float64", layout="MLA", library="torch")
    refuse("no values", query, *latent.get_caches(0), [[1], [2]], [1, 1])
    with pytest.raises(InvalidArgumentError, match="layer 2"):
        batch.storage.get_caches(2)
    assert isinstance(caches[0], torch.Tensor)
