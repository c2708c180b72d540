"""Copy blocks in one Triton launch for all layers."""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import Any
from weakref import ref

import numpy as np
import torch
import triton
import triton.language as tl

from kv_pool.storage.move_kernel import copy_pieces
from kv_pool.storage.segments import IntArray, SegmentTable

NUM_WARPS = 4
_PROGRAMS_PER_MULTIPROCESSOR = 8
# 16 KiB in flight per program: with 8 programs per multiprocessor, more than enough to hide memory latency.
_PIECE_WORDS = (256, 1024, 4096)
# A storage to itself, both directions between it and its scratch blocks, and one more.
_MAX_PAIRS = 4
# The pieces of the last pairs of tables, most recently used pair last. Weak references, so that the tables'
# memory can be freed.
_pieces: dict[tuple[ref[SegmentTable], ref[SegmentTable]], Any] = {}


def copy_by_triton(source: SegmentTable, target: SegmentTable, sources: IntArray, targets: IntArray) -> None:
    """Copy block sources[i] of one table to block targets[i] of the other, for every i.

    Args:
        source, target: tables of one GPU's memory, cut alike (`split_alike`); may be the same table.
        sources, targets: (num_moves,), int64, in host memory; valid ids; targets do not overlap sources.

    Queued on the current stream: a transfer of the ids, then one launch of the kernel of move_kernel.py,
    compiled at the first call. Loads and stores are 16 bytes wide if all bases, strides and spans are
    multiples of 16, otherwise 4 or 1. The pieces of a pair of tables are sent once and kept until four other
    pairs are copied.
    """
    alignment, word, word_bytes = choose_word(gcd(source.alignment, target.alignment))
    longest = int(source.spans.max()) // word_bytes
    piece_words = next((words for words in _PIECE_WORDS if words >= longest), _PIECE_WORDS[-1])
    device = torch.as_tensor(source.owners[0]).device
    pair = (ref(source), ref(target))
    pieces = _pieces.pop(pair, None)
    if pieces is None:
        pieces = torch.from_numpy(cut_into_pieces(source, target, piece_words * word_bytes)).to(device)
    _pieces[pair] = pieces
    while len(_pieces) > _MAX_PAIRS:
        _pieces.pop(next(iter(_pieces)), None)  # another thread may have removed it
    ids = torch.from_numpy(np.stack([sources, targets])).to(device)
    num_pieces = len(pieces)
    num_items = len(sources) * num_pieces
    num_programs = min(num_items, _PROGRAMS_PER_MULTIPROCESSOR * _count_multiprocessors(device))
    # -1: do not switch devices, for the interpreter on the CPU.
    with torch.cuda.device(device if device.type == "cuda" else -1):
        make_kernel()[(num_programs,)](
            pieces,
            ids[0],
            ids[1],
            num_pieces,
            num_items,
            word=word,
            word_bytes=word_bytes,
            piece_words=piece_words,
            alignment=alignment,
            num_warps=NUM_WARPS,
        )


@cache
def make_kernel() -> Any:
    """Return the kernel, not yet compiled. One compilation serves plans of any length and any storage.

    By default, Triton would recompile if an argument becomes 1 or a multiple of 16, which takes a second. If
    TRITON_INTERPRET=1 is set at the first call, the kernel runs in Triton's interpreter, on the CPU and very
    slowly, for tests.
    """
    return triton.jit(
        copy_pieces,
        do_not_specialize=["num_pieces", "num_items"],
        do_not_specialize_on_alignment=["pieces", "sources", "targets"],
    )


def choose_word(alignment: int) -> tuple[int, Any, int]:
    """Return the kernel's parameters for an alignment in bytes: alignment, word type, bytes per word."""
    if alignment % 16 == 0:
        return 16, tl.int32, 4
    if alignment % 4 == 0:
        return 4, tl.int32, 4
    return 1, tl.int8, 1


def cut_into_pieces(source: SegmentTable, target: SegmentTable, piece_bytes: int) -> IntArray:
    """Cut the spans of two tables that are cut alike into pieces: (num_pieces, 5), int64.

    Columns: source base, source stride, target base, target stride, bytes (at most `piece_bytes`).
    """
    counts = -(-source.spans // piece_bytes)
    rows = np.repeat(np.arange(len(source)), counts)
    firsts = np.cumsum(counts) - counts
    offsets = (np.arange(len(rows)) - firsts[rows]) * piece_bytes
    return np.stack(
        [
            source.bases[rows] + offsets,
            source.strides[rows],
            target.bases[rows] + offsets,
            target.strides[rows],
            np.minimum(source.spans[rows] - offsets, piece_bytes),
        ],
        axis=1,
    )


def _count_multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
