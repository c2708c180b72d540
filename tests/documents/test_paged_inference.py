"""The article on PagedAttention: blocks by memory, page tables, a paged layer and engine, tables of figures.

In the article's order. If its code would be wrong, the test says what the package does instead, and why.
"""

import random

import numpy as np
import pytest
from documents.made_examples import load_example

from kv_pool import BlockAllocationRequest, GPUKVPool, InvalidArgumentError, UnknownSequenceError
from kv_pool.integrations.sequence_allocator import KVCacheAllocator
from kv_pool.reports.allocation_monitor import AllocationMonitor


def make_allocator(total_blocks=8, block_size=4, **options):
    return KVCacheAllocator(total_blocks, block_size, num_heads=2, head_dim=4, dtype="float32", **options)


def make_tokens(*numbers):
    """Return K of tokens, (num_tokens, 2, 4), one number per token; V is its negative."""
    key = np.repeat(np.array(numbers, np.float32), 8).reshape(-1, 2, 4)
    return key, -key


def read_numbers(allocator, sequence_id):
    table = allocator.sequence_tables[sequence_id]
    key, value = allocator.read(0, sequence_id, table.length)
    np.testing.assert_array_equal(key, -value)
    return key[:, 0, 0].astype(int).tolist()


# ---- how much memory -----------------------------------------------------------------------------


def test_the_number_of_blocks_fills_70_percent_of_24_gib():
    """Two bytes an element, 16 tokens a block, K and V of all layers. In the article a block has memory for
    one layer, which all layers overwrite; here it has memory for all layers, as the article's formula says.
    """
    block_bytes = 2 * 16 * 32 * 32 * 128 * 2
    counted = KVCacheAllocator.count_blocks(24 * 1024**3 * 0.7, 16, num_layers=32, num_heads=32, head_dim=128)
    assert counted == int(24 * 1024**3 * 0.7 // block_bytes) == 2150
    allocator = KVCacheAllocator(3, 16, num_heads=4, head_dim=8, num_layers=2)
    assert allocator.storage.block_bytes == 2 * 16 * 2 * 4 * 8 * 2
    with pytest.raises(InvalidArgumentError):
        KVCacheAllocator.count_blocks(1000, 16, num_layers=32, num_heads=32, head_dim=128)


# ---- page tables ---------------------------------------------------------------------------------


def test_a_virtual_position_has_a_block_and_an_offset():
    allocator = make_allocator()
    allocator.allocate_sequence(1, 4)
    table = allocator.allocate_sequence(2, 4)
    allocator.extend_sequence(1, 1)
    allocator.extend_sequence(2, 3)
    assert table.get_all_blocks() == [1, 3]
    assert [table.get_physical_location(position) for position in (0, 3, 4, 6)] == [
        (1, 0),
        (1, 3),
        (3, 0),
        (3, 2),
    ]
    for position in (-1, 7):
        with pytest.raises(ValueError, match=f"position {position} of sequence 2 is not one of its 7 tokens"):
            table.get_physical_location(position)


# ---- the allocator -------------------------------------------------------------------------------


def test_a_sequence_may_start_empty():
    allocator = make_allocator()
    table = allocator.allocate_sequence(1)
    assert (table.length, table.blocks) == (0, [])
    allocator.extend_sequence(1, 1)
    assert table.blocks == [0]
    allocator.allocate_sequence(2)
    allocator.free_sequence(2)
    with pytest.raises(InvalidArgumentError, match="sequence 1 already exists"):
        allocator.allocate_sequence(1)


def test_without_a_free_block_a_memory_error_is_raised():
    allocator = make_allocator(total_blocks=2)
    table = allocator.allocate_sequence(1, 8)
    with pytest.raises(MemoryError, match="1 tokens of sequence 1 do not fit: 0 blocks are free of 2"):
        allocator.extend_sequence(1, 1)
    with pytest.raises(MemoryError):
        allocator.allocate_sequence(2, 1)
    assert (table.length, list(allocator.sequence_tables)) == (8, [1])
    with pytest.raises(InvalidArgumentError, match="additional_tokens is -1"):
        allocator.extend_sequence(1, -1)


@pytest.mark.parametrize("seed", range(3))
def test_sequences_always_read_what_they_wrote(seed):
    rng = random.Random(seed)
    allocator = make_allocator(total_blocks=12)
    expected = {}
    for step in range(400):
        action = rng.choice(["begin", "extend", "extend", "extend", "fork", "free"])
        try:
            if action == "begin":
                length = rng.randrange(7)
                allocator.allocate_sequence(step, length)
                expected[step] = [1000 * (step % 50) + n for n in range(length)]
                allocator.write(0, step, 0, *make_tokens(*expected[step]))
            elif action == "free" and expected:
                sequence_id = rng.choice(list(expected))
                allocator.free_sequence(sequence_id)
                del expected[sequence_id]
            elif action == "extend" and expected:
                sequence_id = rng.choice(list(expected))
                count = rng.randrange(1, 6)
                allocator.extend_sequence(sequence_id, count)
                new = [rng.randrange(50_000) for _ in range(count)]
                allocator.write(0, sequence_id, len(expected[sequence_id]), *make_tokens(*new))
                expected[sequence_id] += new
            elif action == "fork" and expected:
                sequence_id = rng.choice(list(expected))
                allocator.fork_sequence(sequence_id, step)
                expected[step] = list(expected[sequence_id])
        except MemoryError:
            sequence_id = rng.choice(list(expected))
            allocator.free_sequence(sequence_id)
            del expected[sequence_id]
        assert {sequence_id: read_numbers(allocator, sequence_id) for sequence_id in expected} == expected
        assert allocator.manager.get_num_free_blocks() == len(allocator.free_blocks)
    assert len(expected) > 1


# ---- layer and engine ----------------------------------------------------------------------------

CONFIG = {"n_layers": 2, "d_model": 16, "n_heads": 4, "head_dim": 4}


def make_engine(memory_gb=2e-4):
    import torch

    torch.manual_seed(0)
    return load_example("paged_transformer").PagedInferenceEngine(
        CONFIG, gpu_memory_gb=memory_gb, dtype="float64"
    )


def compute_densely(engine, inputs):
    """Compute all tokens at once without blocks: each layer's causal attention over the whole input."""
    import torch

    hidden = inputs
    with torch.no_grad():
        for layer in engine.layers:
            hidden = layer(hidden, sequence_id=0, position=0, use_kv_cache=False)
    return hidden


@pytest.mark.torch
def test_attention_over_blocks_equals_dense_attention():
    import torch

    torch.manual_seed(0)
    allocator = make_allocator(library="torch")
    allocator.allocate_sequence(5)
    attention = load_example("paged_transformer").PagedAttention(allocator)
    keys, values, query = torch.randn(3, 11, 2, 4)
    for position in range(11):
        attention.update_kv_cache(keys[position], values[position], 5, position)
    assert len(allocator.sequence_tables[5].blocks) == 3
    answer = attention.compute_attention(query[0], 5, context_length=9)
    weights = torch.softmax(torch.einsum("hd,thd->ht", query[0], keys[:9]) / 2, dim=-1)
    torch.testing.assert_close(answer, torch.einsum("ht,thd->hd", weights, values[:9]))
    with pytest.raises(InvalidArgumentError, match="the next one is at 11, not 13"):
        attention.update_kv_cache(keys[0], values[0], 5, 13)


@pytest.mark.torch
def test_an_engine_creates_generates_and_frees():
    """In the article a prompt stores no K and V, so generated tokens attend to zeros; here it stores them."""
    import torch

    engine = make_engine()
    assert engine.allocator.total_blocks == int(2e-4 * 2**30 * 0.7 // (2 * 16 * 2 * 4 * 4 * 8))
    prompts = [torch.randn(length, 16, dtype=torch.float64) for length in (20, 3)]
    ids = [engine.create_sequence(prompt) for prompt in prompts]
    assert ids == [0, 1]
    inputs = dict(zip(ids, prompts, strict=True))
    for _ in range(15):
        for sequence_id in ids:
            last = engine.active_sequences[sequence_id].hidden_state
            inputs[sequence_id] = torch.cat([inputs[sequence_id], last[None]])
            generated = engine.generate_token(sequence_id)
            torch.testing.assert_close(generated, compute_densely(engine, inputs[sequence_id])[-1])
    assert [engine.active_sequences[sequence_id].length for sequence_id in ids] == [35, 18]
    assert len(engine.allocator.used_blocks) == 3 + 2
    engine.free_sequence(0)
    with pytest.raises(UnknownSequenceError, match="there is no sequence 0"):
        engine.generate_token(0)
    with pytest.raises(UnknownSequenceError):
        engine.free_sequence(0)
    engine.free_sequence(1)
    assert len(engine.allocator.free_blocks) == engine.allocator.total_blocks
    with pytest.raises(InvalidArgumentError, match="the prompt is empty"):
        engine.create_sequence(prompts[0][:0])


@pytest.mark.torch
def test_a_full_engine_continues_after_a_sequence_ends():
    import torch

    engine = make_engine(memory_gb=4e-5)
    total_blocks = engine.allocator.total_blocks
    first = engine.create_sequence(torch.randn(16 * (total_blocks - 1), 16, dtype=torch.float64))
    second = engine.create_sequence(torch.randn(16, 16, dtype=torch.float64))
    with pytest.raises(MemoryError):
        engine.generate_token(second)
    assert engine.active_sequences[second].length == 16
    engine.free_sequence(first)
    engine.generate_token(second)
    assert engine.active_sequences[second].length == 17


@pytest.mark.torch
def test_heads_that_do_not_divide_the_model_are_refused():
    layer_class = load_example("paged_transformer").PagedTransformerLayer
    with pytest.raises(InvalidArgumentError, match="d_model is 10, which is not a multiple of n_heads, 4"):
        layer_class(10, 4, make_allocator())


# ---- the tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_sequences", "min_length", "max_length", "percent"),
    [(8, 2048, 2048, 95), (8, 1, 1023, 92), (8, 300, 2048, 89), (2, 8192, 8192, 94)],
    ids=["fixed length of 2,048", "average of 512", "8 sequences", "8,192 tokens"],
)
def test_utilization_matches_the_articles_table(num_sequences, min_length, max_length, percent):
    """Lengths are random; the article's percentages are the minimum to reach, with blocks of 16."""
    rng = random.Random(0)
    allocator = KVCacheAllocator(1024, 16, num_heads=1, head_dim=1)
    for sequence_id in range(num_sequences):
        allocator.allocate_sequence(sequence_id, rng.randint(min_length, max_length))
    assert allocator.get_utilization() >= percent / 100
    assert allocator.get_utilization() <= 1.0


# ---- the monitor ---------------------------------------------------------------------------------


def test_a_monitor_keeps_a_history_of_states():
    """The article's fragmentation is the share of free blocks; here, of free blocks that serve no run."""
    now = [100.0]
    pool = GPUKVPool(40, 16)
    monitor = AllocationMonitor(pool, max_states=3, clock=lambda: now[0])
    for sequence_id in range(4):
        monitor.log_allocation_state()
        pool.allocate(BlockAllocationRequest(num_blocks=5, sequence_id=sequence_id))
        now[0] += 1
    assert [state.timestamp for state in monitor.history] == [101.0, 102.0, 103.0]
    assert [(state.used_blocks, state.free_blocks) for state in monitor.history] == [
        (5, 35),
        (10, 30),
        (15, 25),
    ]
    assert [state.active_sequences for state in monitor.history] == [1, 2, 3]
    state = monitor.log_allocation_state()
    assert state is monitor.history[-1]
    assert state.fragmentation_rate == pool.get_fragmentation_rate()
    assert state.utilization == 0.5
    with pytest.raises(InvalidArgumentError, match="max_states is 0"):
        AllocationMonitor(pool, 0)
