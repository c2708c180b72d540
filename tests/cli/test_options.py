"""Capacity from memory and model options."""

from dataclasses import replace

import pytest
from lab.made_trace import record, write_trace

from kv_pool.cli.options import CapacityOptions
from kv_pool.lab.settings import ReplaySettings

BLOCK_BYTES = 8 * 131_072  # of the trace's blocks, for llama-3-8b


@pytest.fixture
def trace(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [record(16, [1, 2])])
    return ReplaySettings(str(path), 1, trace_block_size=8)


def find(trace, memory, *, block_size=None, model=None, dimensions=(0, 0, 0), dtype_bytes=2, groups="full"):
    """Return the number of blocks, and the bytes of each."""
    settings = replace(trace, block_size=block_size, groups=groups)
    found, _ = CapacityOptions(model, *dimensions, dtype_bytes, memory=memory).find(settings)
    return found.num_blocks, found.block_bytes


def count(trace, memory, **options):
    return find(trace, memory, **options)[0]


def test_default_block_size_is_the_traces(trace):
    assert count(trace, "1GiB", model="llama-3-8b") == 2**30 // BLOCK_BYTES - 1
    assert count(trace, "1GiB", model="llama-3-8b", block_size=16) == 2**30 // (2 * BLOCK_BYTES) - 1


def test_blocks_of_token_id_traces_have_16_tokens(tmp_path):
    trace = ReplaySettings(str(write_trace(tmp_path / "trace.jsonl", [{"token_ids": [1, 2, 3]}])), 1)
    assert count(trace, "1GiB", model="llama-3-8b") == 2**30 // (16 * 131_072) - 1


def test_bytes_of_a_block_are_unknown_without_a_model(trace):
    assert CapacityOptions(blocks="10").find(trace) == (replace(trace, num_blocks=10), [10])
