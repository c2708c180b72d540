"""Copy blocks in host memory, row by row. Indexing torch tensors would be at least 10 times slower."""

import ctypes

import numpy as np

from kv_pool.storage.segments import IntArray, SegmentTable, find_runs

# Below this size, a memmove call per row costs more than the copy, so NumPy copies many rows per call.
_ROW_BYTES = 16 * 1024
# Small rows pass through a buffer that fits into the L2 cache.
_BUFFER_BYTES = 256 * 1024


def copy_on_cpu(source: SegmentTable, target: SegmentTable, sources: IntArray, targets: IntArray) -> None:
    """Copy block sources[i] of one table to block targets[i] of the other, for every i. Done on return.

    Args:
        source, target: tables of host memory, cut alike (`split_alike`); may be the same table.
        sources, targets: (num_moves,), int64; valid ids; targets do not overlap sources.

    In rows without padding, consecutive moves from consecutive to consecutive blocks are copied as one.
    Cost: memmove's rate for spans of 16 KiB or more, whatever the order of the moves.
    """
    starts, lengths = find_runs(sources, targets)
    for row in range(len(source)):
        span = int(source.spans[row])
        is_dense = span == source.strides[row] == target.strides[row]
        if is_dense and span * len(sources) >= _ROW_BYTES * len(starts):
            _copy_spans(
                source.bases[row] + sources[starts] * span,
                target.bases[row] + targets[starts] * span,
                lengths * span,
            )
        elif span >= _ROW_BYTES:
            _copy_spans(
                source.bases[row] + sources * source.strides[row],
                target.bases[row] + targets * target.strides[row],
                np.full(len(sources), span),
            )
        else:
            from_rows, to_rows = source.view_row(row), target.view_row(row)
            step = max(1, _BUFFER_BYTES // span)
            for start in range(0, len(sources), step):
                to_rows[targets[start : start + step]] = from_rows[sources[start : start + step]]


def _copy_spans(from_addresses: IntArray, to_addresses: IntArray, num_bytes: IntArray) -> None:
    memmove = ctypes.memmove
    for from_address, to_address, count in zip(
        from_addresses.tolist(), to_addresses.tolist(), num_bytes.tolist(), strict=True
    ):
        memmove(to_address, from_address, count)
