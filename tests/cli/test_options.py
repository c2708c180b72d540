"""Capacity from memory and model options."""

from dataclasses import replace

import pytest
from replay.made_trace import record, write_trace

from kv_pool import InvalidArgumentError
from kv_pool.cli.options import ModelOptions, find_capacities
from kv_pool.replay.settings import ReplaySettings

BLOCK_BYTES = 8 * 131_072  # of the trace's blocks, for llama-3-8b


@pytest.fixture
def trace(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [record(16, [1, 2])])
    return ReplaySettings(str(path), 1, trace_block_size=8)


def find(trace, memory, *, block_size=None, model=None, dimensions=(0, 0, 0), dtype_bytes=2, groups="full"):
    """Return the number of blocks, and the bytes of each."""
    kv = ModelOptions(model, *dimensions, dtype_bytes).find_kv()
    settings = replace(trace, block_size=block_size, groups=groups)
    (num_blocks,), block_bytes = find_capacities(settings, None, memory, kv)
    return num_blocks, block_bytes


def count(trace, memory, **options):
    return find(trace, memory, **options)[0]


def test_default_block_size_is_the_traces(trace):
    assert count(trace, "1GiB", model="llama-3-8b") == 2**30 // BLOCK_BYTES - 1
    assert count(trace, "1GiB", model="llama-3-8b", block_size=16) == 2**30 // (2 * BLOCK_BYTES) - 1


def test_blocks_of_token_id_traces_have_16_tokens(tmp_path):
    trace = ReplaySettings(str(write_trace(tmp_path / "trace.jsonl", [{"token_ids": [1, 2, 3]}])), 1)
    assert count(trace, "1GiB", model="llama-3-8b") == 2**30 // (16 * 131_072) - 1


def test_memory_needs_a_model_or_dimensions(trace):
    with pytest.raises(InvalidArgumentError, match="--memory needs either --model, or --num-layers"):
        count(trace, "1GiB")


def test_model_and_dimensions_together_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"pass either --model, or --num-layers, .* not both"):
        ModelOptions("llama-3-8b", 32, 8, 128).find_kv()


@pytest.mark.parametrize(("blocks", "memory"), [(None, None), ("10", "1GiB")])
def test_capacity_is_either_blocks_or_memory(trace, blocks, memory):
    with pytest.raises(InvalidArgumentError, match="either as --blocks or as --memory"):
        find_capacities(trace, blocks, memory, ModelOptions("llama-3-8b").find_kv())


def test_bytes_of_a_block_are_unknown_without_a_model(trace):
    assert find_capacities(trace, "10", None, None) == ([10], 0)


def test_missing_dimensions_are_an_error(trace):
    with pytest.raises(InvalidArgumentError, match="no KV"):
        count(trace, "1GiB", dimensions=(32, 0, 128))


def test_memory_too_small_for_two_blocks_is_an_error(trace):
    with pytest.raises(InvalidArgumentError, match="hold 1 blocks of"):
        count(trace, str(2 * BLOCK_BYTES - 1), model="llama-3-8b")
