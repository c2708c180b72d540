"""Compiles and launches the kernel of attention_kernel.py."""

from __future__ import annotations

from functools import cache
from math import e, log2
from typing import Any

import numpy as np
import torch

_CHUNK_TOKENS = 64
_MIN_ROWS = 16
_MAX_ROWS = 64
_PROGRAMS_PER_MULTIPROCESSOR = 2
_MIN_SPLIT_TOKENS = 512

NUM_WARPS = 4


def can_use_triton(query: torch.Tensor) -> bool:
    """Return whether the query is on a GPU, in a type that Triton multiplies, and Triton is installed."""
    return query.is_cuda and query.dtype.itemsize in (2, 4) and _has_triton()


@cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401 # only tests whether it is installed
    except ImportError:
        return False
    return True


@cache
def make_kernel() -> Any:
    """Return the kernel, not yet compiled; for Triton's interpreter if TRITON_INTERPRET=1 is set."""
    import triton

    from kv_pool.integrations.attention.attention_kernel import attend_over_blocks

    # Strides are specialized, because multiples of 16 allow wide loads.
    counts = ["num_tokens", "columns", "sliding_window", "num_splits"]
    return triton.jit(attend_over_blocks, do_not_specialize=counts)


def attend_by_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: Any,
    seq_lens: Any,
    query_start_loc: Any,
    scale: float,
    sliding_window: int | None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """See `paged_attention`; the arguments are already checked.

    Args:
        num_splits: number of parts of K and V, each processed by its own programs; None: enough to keep the
            GPU busy.

    Queues one launch and the merge of the splits on the current stream.
    """
    num_tokens, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    if query.stride(2) != 1:
        query = query.contiguous()
    most_query_tokens = int(np.diff(torch.as_tensor(query_start_loc).cpu().numpy()).max())
    tables, lengths, starts = (
        torch.as_tensor(given).to(query.device, torch.int32).contiguous()
        for given in (block_tables, seq_lens, query_start_loc)
    )
    constants = choose_constants(num_heads, num_kv_heads, head_size, block_size, most_query_tokens)
    num_tiles = -(-most_query_tokens // constants["tile_tokens"])
    num_programs = len(lengths) * num_tiles * num_kv_heads
    if num_splits is None:
        num_splits = _choose_splits(query.device, num_programs, tables.shape[1] * block_size)
    dtype = query.dtype if num_splits == 1 else torch.float32
    output = query.new_empty((num_splits, *query.shape), dtype=dtype)
    sum_logs = query.new_empty((num_splits, num_tokens, num_heads), dtype=torch.float32)
    # -1: no device to switch to when the interpreter runs on the CPU.
    with torch.cuda.device(query.device if query.is_cuda else -1):
        make_kernel()[(len(lengths), num_tiles, num_kv_heads * num_splits)](
            query,
            key_cache,
            value_cache,
            output,
            sum_logs,
            tables,
            lengths,
            starts,
            num_tokens,
            tables.shape[1],
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            scale * log2(e),
            sliding_window or 0,
            num_splits,
            **constants,
            num_warps=NUM_WARPS,
        )
    if num_splits == 1:
        return output[0]
    weights = torch.exp2(sum_logs - sum_logs.amax(0))
    weights /= weights.sum(0)
    return (output * weights[..., None]).sum(0).to(query.dtype)


def choose_constants(
    num_heads: int, num_kv_heads: int, head_size: int, block_size: int, most_query_tokens: int
) -> dict[str, int]:
    """Return the constants that the kernel is compiled for."""
    group = num_heads // num_kv_heads
    group_rows = _round_up_to_power(group)
    rows = max(_MIN_ROWS, min(_MAX_ROWS, group_rows * _round_up_to_power(most_query_tokens)), group_rows)
    return {
        "num_kv_heads": num_kv_heads,
        "group": group,
        "group_rows": group_rows,
        "tile_tokens": rows // group_rows,
        "block_size": block_size,
        "head_size": head_size,
        "head_columns": max(16, _round_up_to_power(head_size)),
        "chunk_tokens": _CHUNK_TOKENS,
    }


def _choose_splits(device: torch.device, num_programs: int, num_tokens: int) -> int:
    """Choose splits for two programs per multiprocessor, of at least 512 tokens each."""
    if device.type == "cpu":
        return 1
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(int(wanted) // num_programs, num_tokens // _MIN_SPLIT_TOKENS))


def _round_up_to_power(count: int) -> int:
    return 1 << (count - 1).bit_length()
