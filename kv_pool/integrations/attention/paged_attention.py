"""`paged_attention`: causal attention for a batch whose K and V are in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.integrations.attention.gathered_attention import attend_gathered
from kv_pool.integrations.attention.triton_attention import attend_by_triton, can_use_triton


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: Any,
    seq_lens: Any,
    query_start_loc: Any = None,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Compute attention of each sequence's last tokens over all its tokens: prefill, decode or both.

        |<-------------- seq_lens[i] -------------->|
        |  computed before  |<-- query tokens ----->|   each attends to itself and the tokens before it

    >>> import torch
    >>> from kv_pool.integrations.attention import paged_attention
    >>> from kv_pool.storage import KVStorage
    >>> storage = KVStorage.allocate(10, 16, num_layers=1, num_kv_heads=2, head_size=64, dtype="float32",
    ...                              library="torch")
    >>> query = torch.zeros(2, 8, 64)                      # two sequences decode, 4 query heads per KV head
    >>> output = paged_attention(query, *storage.get_caches(0), [[3, 7], [5, 0]], [20, 9])
    >>> tuple(output.shape)
    (2, 8, 64)

    Args:
        query: (num_tokens, num_heads, head_size), the sequences concatenated. num_heads is a multiple of
            num_kv_heads; query head h uses KV head h // (num_heads // num_kv_heads).
        key_cache, value_cache: (num_blocks, block_size, num_kv_heads, head_size), dtype and device of
            `query`, any strides with adjacent elements of a head: `KVStorage.get_caches`.
        block_tables: (num_seqs, max_num_blocks), integers. Entries after a sequence's last token or before
            its window are not read.
        seq_lens: (num_seqs,), integers: tokens with K and V of each sequence, including its query tokens.
        query_start_loc: (num_seqs + 1,), integers, from 0 to num_tokens: sequence i has the query tokens
            `[query_start_loc[i], query_start_loc[i + 1])`. None: one per sequence (decode).
        scale: factor of the scores; 1 / sqrt(head_size) by default.
        sliding_window: a token attends to this many tokens, including itself; None: to all.
    Returns:
        Shape, dtype and device of `query`. Scores are summed in float32 or wider; where a sequence is
        attended over in chunks, their results are rounded to the dtype of `query` before they are summed.
    Raises:
        InvalidArgumentError: shapes, dtypes or devices do not match, or a query is longer than its sequence.
        InvalidBlockError: a block id is outside the caches. Tables and lengths on a GPU are not checked,
            because that would wait for the GPU.

    The last three tables may be lists, NumPy arrays or tensors on any device. On a GPU with float16, bfloat16
    or float32 this is one Triton kernel for prefill and decode; keep `query_start_loc` in host memory, or its
    longest query has to be read back. Otherwise blocks are gathered 1 or 2 MiB at a time, which stay in the
    processor's caches, and go through torch's attention; tables and lengths are read in host memory.
    No gradients.

    Cost: O(query tokens * seq_len) per sequence; on a CPU, also a time per sequence, which is most of it for
    contexts of a few hundred tokens. Memory for the output, and without the kernel for up to nine results
    of 256 query tokens in float32.
    """
    _check_tensors(query, key_cache, value_cache)
    num_tokens = len(query)
    if scale is None:
        scale = query.shape[2] ** -0.5
    if sliding_window is not None and sliding_window < 1:
        raise InvalidArgumentError(f"sliding_window is {sliding_window}; it is 1 or more, or None for all")
    if query_start_loc is None:
        query_start_loc = np.arange(len(seq_lens) + 1)
    if not any(getattr(given, "is_cuda", False) for given in (block_tables, seq_lens, query_start_loc)):
        tables, lengths, starts = (_to_host(given) for given in (block_tables, seq_lens, query_start_loc))
        _check_tables(num_tokens, tables, lengths, starts, key_cache.shape, sliding_window)
        block_tables, seq_lens, query_start_loc = tables, lengths, starts
    if num_tokens == 0:
        return torch.empty_like(query)
    with torch.no_grad():
        if can_use_triton(query):
            return attend_by_triton(
                query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, scale, sliding_window
            )
        tables, lengths, starts = (_to_host(given) for given in (block_tables, seq_lens, query_start_loc))
        return attend_gathered(query, key_cache, value_cache, tables, lengths, starts, scale, sliding_window)


def _to_host(given: Any) -> npt.NDArray[np.int64]:
    if isinstance(given, torch.Tensor):
        given = given.cpu().numpy()
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise InvalidArgumentError("rows of block_tables differ in length; pad short ones with 0") from error
    if array.size and array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"block ids and lengths must be integers, not {array.dtype}")
    return array.astype(np.int64, copy=False)


def _check_tensors(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    if key_cache is None or value_cache is None:
        raise InvalidArgumentError("a latent cache has no values; paged_attention needs K and V")
    if query.ndim != 3 or key_cache.ndim != 4 or key_cache.shape != value_cache.shape:
        raise InvalidArgumentError(
            f"query has shape {tuple(query.shape)}, the caches {tuple(key_cache.shape)} and "
            f"{tuple(value_cache.shape)}; query must be (num_tokens, num_heads, head_size), each cache "
            "(num_blocks, block_size, num_kv_heads, head_size)"
        )
    num_heads, head_size = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    if head_size != key_cache.shape[3] or num_heads % num_kv_heads:
        raise InvalidArgumentError(
            f"{num_heads} query heads of size {head_size} do not match {num_kv_heads} KV heads of size "
            f"{key_cache.shape[3]}"
        )
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise InvalidArgumentError(
            f"the elements of a head have strides {key_cache.stride(3)} and {value_cache.stride(3)}, not 1"
        )
    kinds = {(tensor.dtype, tensor.device) for tensor in (query, key_cache, value_cache)}
    if len(kinds) > 1 or not query.dtype.is_floating_point or query.dtype.itemsize < 2:
        raise InvalidArgumentError(
            f"query and caches are {query.dtype} on {query.device}, {key_cache.dtype} on {key_cache.device} "
            f"and {value_cache.dtype} on {value_cache.device}; all must have one floating-point type of at "
            "least 16 bits, on one device"
        )


def _check_tables(
    num_tokens: int,
    tables: npt.NDArray[np.int64],
    seq_lens: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    cache_shape: Sequence[int],
    sliding_window: int | None,
) -> None:
    if tables.ndim != 2 or seq_lens.ndim != 1 or len(tables) != len(seq_lens):
        raise InvalidArgumentError(
            f"block_tables has shape {tables.shape}, seq_lens {seq_lens.shape}; each sequence needs a row "
            "and a length"
        )
    if starts.shape != (len(seq_lens) + 1,) or starts[0] != 0 or starts[-1] != num_tokens:
        raise InvalidArgumentError(
            f"query_start_loc has shape {starts.shape} and ends at {starts[-1:].tolist()}; it must go from 0 "
            f"to the {num_tokens} tokens of query in {len(seq_lens)} steps"
        )
    query_lens = np.diff(starts)
    wrong = np.flatnonzero((query_lens < 0) | (query_lens > seq_lens))
    if len(wrong):
        raise InvalidArgumentError(
            f"sequence {wrong[0]} has {query_lens[wrong[0]]} query tokens and a length of "
            f"{seq_lens[wrong[0]]}; query tokens are the last tokens of their sequence"
        )
    num_blocks, block_size = cache_shape[:2]
    num_used = -(-seq_lens // block_size)
    short = np.flatnonzero(num_used > tables.shape[1])
    if len(short):
        raise InvalidArgumentError(
            f"sequence {short[0]} has {seq_lens[short[0]]} tokens, too many for a table of "
            f"{tables.shape[1]} blocks of {block_size}"
        )
    columns = np.arange(tables.shape[1])
    is_read = columns < num_used[:, None]
    if sliding_window is not None:
        first = np.maximum(seq_lens - query_lens - sliding_window + 1, 0) // block_size
        is_read &= columns >= first[:, None]
    outside = is_read & ((tables < 0) | (tables >= num_blocks))
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise InvalidBlockError(
            f"sequence {row} has block {tables[row, column]}, which is not one of 0 to {num_blocks - 1}"
        )
