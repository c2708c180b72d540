"""Copying blocks by one Triton launch for all layers."""

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
# 16 KiB in flight a program: with 8 programs on a multiprocessor far more than the memory's latency asks for.
_PIECE_WORDS = (256, 1024, 4096)
# A storage, and both ways between it and its scratch blocks; and one more.
_MAX_PAIRS = 4


class TritonCopy:
    """Copies blocks by the kernel of move_kernel.py, which is compiled at the first call.

    Where TRITON_INTERPRET=1 is set when this is made, the kernel runs in Triton's interpreter, on the CPU and
    very slowly: for tests.
    """

    def __init__(self) -> None:
        self._kernel = make_kernel()
        # Tables weakly, or memory that nobody uses any more would stay. The pair used last is the last one.
        self._pieces: dict[tuple[ref[SegmentTable], ref[SegmentTable]], Any] = {}

    def __call__(
        self, source: SegmentTable, target: SegmentTable, sources: IntArray, targets: IntArray
    ) -> None:
        """Copy block sources[i] of one table to block targets[i] of the other, for every i.

        Args:
            source, target: tables of memory of one GPU, cut alike (`split_alike`); may be one and the same.
            sources, targets: (num_moves,), int64, in host memory; valid ids, and no target's bytes are a
                source's.

        Queued on the current stream: one launch, after the ids have been sent. Loads and stores are 16 bytes
        wide where all bases, strides and spans are multiples of that, 4 or 1 else. The pieces of a pair of
        tables are sent once and kept until four other pairs are copied.
        """
        alignment, word, word_bytes = choose_word(gcd(source.alignment, target.alignment))
        longest = int(source.spans.max()) // word_bytes
        piece_words = next((words for words in _PIECE_WORDS if words >= longest), _PIECE_WORDS[-1])
        device = torch.as_tensor(source.owners[0]).device
        pair = (ref(source), ref(target))
        pieces = self._pieces.pop(pair, None)
        if pieces is None:
            pieces = torch.from_numpy(cut_into_pieces(source, target, piece_words * word_bytes)).to(device)
        self._pieces[pair] = pieces
        while len(self._pieces) > _MAX_PAIRS:
            self._pieces.pop(next(iter(self._pieces)), None)  # another thread may have been faster
        ids = torch.from_numpy(np.stack([sources, targets])).to(device)
        num_pieces = len(pieces)
        num_items = len(sources) * num_pieces
        num_programs = min(num_items, _PROGRAMS_PER_MULTIPROCESSOR * _count_multiprocessors(device))
        # -1: no device to switch to, where the interpreter runs on the CPU.
        with torch.cuda.device(device if device.type == "cuda" else -1):
            self._kernel[(num_programs,)](
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


def make_kernel() -> Any:
    """The kernel, not yet compiled; one compilation serves plans of every length and every storage.

    Left to itself Triton compiles anew where a number becomes 1 or a multiple of 16, a second each time.
    """
    return triton.jit(
        copy_pieces,
        do_not_specialize=["num_pieces", "num_items"],
        do_not_specialize_on_alignment=["pieces", "sources", "targets"],
    )


@cache
def get_triton_copy() -> TritonCopy:
    """The one of this process, so that the kernel is compiled once."""
    return TritonCopy()


def choose_word(alignment: int) -> tuple[int, Any, int]:
    """What the kernel is told for memory aligned to so many bytes: alignment, type of a word, its bytes."""
    if alignment % 16 == 0:
        return 16, tl.int32, 4
    if alignment % 4 == 0:
        return 4, tl.int32, 4
    return 1, tl.int8, 1


def cut_into_pieces(source: SegmentTable, target: SegmentTable, piece_bytes: int) -> IntArray:
    """The spans of two tables that are cut alike, in pieces: (num_pieces, 5), int64.

    Columns: source base, source stride, target base, target stride, bytes: at most `piece_bytes`.
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
