"""Copy blocks with torch operations, on a GPU without triton."""

from __future__ import annotations

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
    gathered into a temporary tensor of at most 256 MiB and scattered from there; two launches per row and
    temporary.
    """
    device = torch.as_tensor(source.owners[0]).device
    from_ids = torch.from_numpy(sources).to(device)
    to_ids = torch.from_numpy(targets).to(device)
    word_bytes = gcd(source.alignment, target.alignment, 8)
    for row in range(len(source)):
        from_view, to_view = (_view_row(table, row, word_bytes) for table in (source, target))
        step = max(1, _TEMPORARY_BYTES // int(source.spans[row]))
        for start in range(0, len(sources), step):
            some = slice(start, start + step)
            to_view.index_copy_(0, to_ids[some], from_view.index_select(0, from_ids[some]))


def _view_row(table: SegmentTable, row: int, word_bytes: int) -> torch.Tensor:
    """Return a view of one span of every block: (num_blocks, words per span)."""
    owner = torch.as_tensor(table.owners[row])
    memory = owner.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=owner.device).set_(memory)
    skipped = -memory.data_ptr() % word_bytes
    num_words = (len(flat) - skipped) // word_bytes
    words = flat[skipped : skipped + num_words * word_bytes].view(_WORDS[word_bytes])
    return words.as_strided(
        (table.num_blocks, int(table.spans[row]) // word_bytes),
        (int(table.strides[row]) // word_bytes, 1),
        (int(table.bases[row]) - memory.data_ptr() - skipped) // word_bytes,
    )
