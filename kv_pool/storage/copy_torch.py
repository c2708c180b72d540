"""Copy blocks with torch operations, on a GPU without triton."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import torch

from kv_pool.storage.segments import IntArray, SegmentTable

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

# Blocks pass through a temporary tensor, so a long plan is split.
_TEMPORARY_BYTES = 256 * 1024 * 1024


def copy_by_torch(source: SegmentTable, target: SegmentTable, sources: IntArray, targets: IntArray) -> None:
    """Copy block sources[i] of one table to block targets[i] of the other, for every i.

    Args:
        source, target: tables of tensors on one device (arrays are on the CPU), cut alike (`split_alike`);
            may be the same table.
        sources, targets: (num_moves,), int64, on the CPU; valid ids; targets do not overlap sources.

    Queued on the current stream. Cost: twice the memory traffic of a direct copy, because the bytes are
    gathered into a temporary tensor of at most 256 MiB and scattered from there; two launches per group of
    evenly spaced rows and temporary.
    """
    device = torch.as_tensor(source.owners[0]).device
    from_ids = torch.from_numpy(sources).to(device)
    to_ids = torch.from_numpy(targets).to(device)
    word_bytes = gcd(source.alignment, target.alignment, 8)
    for rows in _group_rows(source, target):
        from_view = _view_rows(source, rows, word_bytes)
        to_view = _view_rows(target, rows, word_bytes)
        step = max(1, _TEMPORARY_BYTES // (len(rows) * int(source.spans[rows[0]])))
        for start in range(0, len(sources), step):
            some = slice(start, start + step)
            to_view.index_copy_(1, to_ids[some], from_view.index_select(1, from_ids[some]))


def _group_rows(source: SegmentTable, target: SegmentTable) -> Iterator[range]:
    """Yield the groups of rows that are evenly spaced in one allocation, in both tables: one view each."""
    first = 0
    for row in range(1, len(source) + 1):
        if row == len(source) or not (_continues(source, first, row) and _continues(target, first, row)):
            yield range(first, row)
            first = row


def _continues(table: SegmentTable, first: int, row: int) -> bool:
    """Return True if `row` continues the group that starts at `first`: same shape, same distance."""
    return bool(
        table.owners[row] is table.owners[first]
        and table.spans[row] == table.spans[first]
        and table.strides[row] == table.strides[first]
        and table.bases[row] > table.bases[row - 1]
        and table.bases[row] - table.bases[row - 1] == table.bases[first + 1] - table.bases[first]
    )


def _view_rows(table: SegmentTable, rows: range, word_bytes: int) -> torch.Tensor:
    """Return a view of the spans of these rows: (num_rows, num_blocks, words per span)."""
    owner = torch.as_tensor(table.owners[rows[0]])
    memory = owner.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=owner.device).set_(memory)
    skipped = -memory.data_ptr() % word_bytes
    words = flat[skipped : skipped + (len(flat) - skipped) // word_bytes * word_bytes].view(
        _WORDS[word_bytes]
    )
    base = int(table.bases[rows[0]])
    distance = int(table.bases[rows[1]]) - base if len(rows) > 1 else 0
    return words.as_strided(
        (len(rows), table.num_blocks, int(table.spans[rows[0]]) // word_bytes),
        (distance // word_bytes, int(table.strides[rows[0]]) // word_bytes, 1),
        (base - memory.data_ptr() - skipped) // word_bytes,
    )
