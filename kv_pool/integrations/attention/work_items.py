"""Work items: sequences of any lengths, cut into pieces of equal shape that are computed together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ItemBatch:
    """Items of one shape.

    Attributes:
        rows: (num_items, most query tokens of an item): rows of the query; short items repeat their last.
        positions: the same shape: position of each query token in its sequence.
        num_rows: (num_items,): query tokens of each item.
        block_ids: (num_items, most blocks of an item): short items repeat their first.
        starts: (num_items,): position of each item's first K and V.
        ends: (num_items,): behind the last position that a query token of the item sees.
        is_whole: every query token sees every token of its item's blocks, and no block is repeated.
    """

    rows: IntArray
    positions: IntArray
    num_rows: IntArray
    block_ids: IntArray
    starts: IntArray
    ends: IntArray
    is_whole: bool

    def take(self, start: int, stop: int) -> ItemBatch:
        """Items `[start, stop)`."""
        some = slice(start, stop)
        return ItemBatch(
            self.rows[some],
            self.positions[some],
            self.num_rows[some],
            self.block_ids[some],
            self.starts[some],
            self.ends[some],
            self.is_whole,
        )


def iterate_items(
    block_tables: IntArray,
    seq_lens: IntArray,
    query_start_loc: IntArray,
    block_size: int,
    *,
    tile_tokens: int,
    chunk_blocks: int,
    max_rows: int,
    sliding_window: int | None = None,
) -> Iterator[ItemBatch]:
    """All pairs of a tile of query tokens and a chunk of K and V that it sees, in batches of one shape.

        blocks that a tile sees:   | edge |     8     |  4  | 2 |1| edge |
                                   ^ window begins                       ^ last query token

    Blocks that all query tokens of a tile see wholly are cut into chunks of powers of two, the largest first:
    chunks of one size need neither padding nor a mask. The blocks at both edges need a mask.

    Args:
        tile_tokens: query tokens of a tile, at most; all of one sequence.
        chunk_blocks: blocks of a chunk, at most; a power of two.
        max_rows: query tokens of a batch, padding included; a batch has at least one item.

    A batch holds items whose numbers of query tokens, and at edges of blocks, are between the same powers of
    two, so that less than half of either is padding.

    Cost: O(items + blocks) NumPy, and a step of Python a batch.
    """
    query_lens = np.diff(query_start_loc)
    sequences, firsts = _list_pieces(np.zeros_like(query_lens), -(-query_lens // tile_tokens), tile_tokens)
    tile_lens = np.minimum(query_lens[sequences] - firsts, tile_tokens)
    tile_rows = query_start_loc[sequences] + firsts
    tile_positions = (seq_lens - query_lens)[sequences] + firsts
    tile_ends = tile_positions + tile_lens
    for tiles, blocks, num_blocks, is_whole in _cut_chunks(
        tile_positions, tile_ends, block_size, chunk_blocks, sliding_window
    ):
        kinds = _find_power(tile_lens[tiles]) * 64 + _find_power(num_blocks)
        for kind in np.unique(kinds):
            members = np.flatnonzero(kinds == kind)
            num_rows = tile_lens[tiles[members]].max()
            offsets = np.arange(num_rows)
            columns = np.arange(num_blocks[members].max())
            step = max(1, max_rows // num_rows)
            for start in range(0, len(members), step):
                some = members[start : start + step]
                chosen = tiles[some]
                steps = np.minimum(offsets, tile_lens[chosen, None] - 1)
                places = np.where(columns < num_blocks[some, None], columns, 0) + blocks[some, None]
                starts = blocks[some] * block_size
                yield ItemBatch(
                    tile_rows[chosen, None] + steps,
                    tile_positions[chosen, None] + steps,
                    tile_lens[chosen],
                    block_tables[sequences[chosen, None], places],
                    starts,
                    np.minimum(tile_ends[chosen], starts + num_blocks[some] * block_size),
                    is_whole,
                )


def _cut_chunks(
    positions: IntArray, ends: IntArray, block_size: int, chunk_blocks: int, sliding_window: int | None
) -> Iterator[tuple[IntArray, IntArray, IntArray, bool]]:
    """Chunks of tiles with the query tokens `[positions, ends)`, kind by kind: see `iterate_items`.

    Returns:
        For each kind: tiles, first blocks, numbers of blocks, and whether these are seen wholly.
    """
    first = np.zeros_like(ends)
    whole_start = first
    if sliding_window is not None:
        first = np.maximum(positions - sliding_window + 1, 0) // block_size
        whole_start = -(-np.maximum(ends - sliding_window, 0) // block_size)
    whole_stop = (positions + 1) // block_size
    has_whole = whole_start < whole_stop
    start = whole_start = np.where(has_whole, whole_start, first)
    whole_stop = np.where(has_whole, whole_stop, first)
    size = chunk_blocks
    while size:
        counts = (whole_stop - start) // size
        if counts.any():
            tiles, blocks = _list_pieces(start, counts, size)
            yield tiles, blocks, np.full_like(blocks, size), True
        start = start + counts * size
        size //= 2
    for start, stop in ((first, whole_start), (whole_stop, (ends - 1) // block_size + 1)):
        counts = -(-(stop - start) // chunk_blocks)
        if counts.any():
            tiles, blocks = _list_pieces(start, counts, chunk_blocks)
            yield tiles, blocks, np.minimum(stop[tiles] - blocks, chunk_blocks), False


def _list_pieces(starts: IntArray, counts: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """List `counts[i]` pieces of `size` from `starts[i]` on, for each i: each piece's i, and its start."""
    owners = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owners, starts[owners] + numbers * size


def _find_power(counts: IntArray) -> IntArray:
    """The exponent of the smallest power of two that is not below each count."""
    return np.ceil(np.log2(counts)).astype(np.int64)
