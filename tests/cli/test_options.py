"""Memory and a model as options, to a capacity."""

import pytest
from replay.made_trace import record, write_trace

from kv_pool import InvalidArgumentError
from kv_pool.cli.options import blocks_from_memory
from kv_pool.replay.trace import Trace

BLOCK_BYTES = 8 * 131_072  # of the trace's blocks, for llama-3-8b


@pytest.fixture
def trace(tmp_path):
    return Trace(write_trace(tmp_path / "trace.jsonl", [record(16, [1, 2])]), block_size=8)


def count(trace, memory, *, block_size=None, model=None, dimensions=(0, 0, 0), dtype_bytes=2):
    return blocks_from_memory(trace, block_size, memory, model, *dimensions, dtype_bytes)


def test_blocks_are_the_traces_own_unless_given(trace):
    assert count(trace, "1GiB", model="llama-3-8b") == 2**30 // BLOCK_BYTES - 1
    assert count(trace, "1GiB", model="llama-3-8b", block_size=16) == 2**30 // (2 * BLOCK_BYTES) - 1


def test_blocks_of_token_id_traces_have_16_tokens(tmp_path):
    trace = Trace(write_trace(tmp_path / "trace.jsonl", [{"token_ids": [1, 2, 3]}]))
    assert count(trace, "1GiB", model="llama-3-8b") == 2**30 // (16 * 131_072) - 1


def test_dimensions_count_as_the_model_that_has_them(trace):
    assert count(trace, "1GiB", dimensions=(32, 8, 128)) == count(trace, "1GiB", model="llama-3-8b")


@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v3"])
def test_elements_of_half_the_size_make_twice_the_blocks(trace, model):
    whole = count(trace, "1GiB", model=model) + 1
    halved = count(trace, "1GiB", model=model, dtype_bytes=1) + 1
    assert halved // 2 == whole


@pytest.mark.parametrize(
    "given", [{}, {"model": "llama-3-8b", "dimensions": (32, 8, 128)}], ids=["neither", "both"]
)
def test_memory_needs_a_model_or_dimensions_but_not_both(trace, given):
    with pytest.raises(InvalidArgumentError, match="--memory needs either --model, or --num-layers"):
        count(trace, "1GiB", **given)


def test_dimensions_that_are_left_out_are_an_error(trace):
    with pytest.raises(InvalidArgumentError, match="no KV"):
        count(trace, "1GiB", dimensions=(32, 0, 128))


def test_memory_too_small_for_two_blocks_is_an_error(trace):
    with pytest.raises(InvalidArgumentError, match="hold 1 blocks of"):
        count(trace, str(2 * BLOCK_BYTES - 1), model="llama-3-8b")
