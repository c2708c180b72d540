"""Work items: sequences of any lengths, cut into pieces of similar size that are computed together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ItemBatch:
    """Items that are computed together.

    Attributes:
        rows: (num_items, most query tokens of an item): rows of the query; short items repeat their last.
        positions: the same shape: position of each query token in its sequence.
        num_rows: (num_items,): query tokens of each item.
        block_ids: (num_items, most blocks of an item): short items repeat their first.
        starts: (num_items,): position of each item's first K and V.
        ends: (num_items,): behind the last position that a query token of the item sees.
    """

    rows: IntArray
    positions: IntArray
    num_rows: IntArray
    block_ids: IntArray
    starts: IntArray
    ends: IntArray


def iterate_items(
    block_tables: IntArray,
    seq_lens: IntArray,
    query_start_loc: IntArray,
    block_size: int,
    *,
    tile_tokens: int,
    chunk_blocks: int,
    max_blocks: int,
    sliding_window: int | None = None,
) -> Iterator[ItemBatch]:
    """All pairs of a tile of query tokens and a chunk of K and V that it sees, in batches.

                  chunk 0   chunk 1   chunk 2
        tile 0    | item |
        tile 1    | item  |   item   |
        tile 2    | item  |   item   | item |

    Args:
        tile_tokens: query tokens of a tile, at most; all of one sequence.
        chunk_blocks: blocks of a chunk, at most; half of it for tiles of several query tokens, of whose last
            chunk only a part is seen.
        max_blocks: blocks of a batch, padding included; a batch has at least one item.

    A batch holds items whose numbers of query tokens, and of blocks, are between the same powers of two, so
    that less than half of either is padding.

    Cost: O(items + blocks) NumPy, and a step of Python a batch.
    """
    query_lens = np.diff(query_start_loc)
    num_tiles = -(-query_lens // tile_tokens)
    sequences = np.repeat(np.arange(len(seq_lens)), num_tiles)
    firsts = (
        np.arange(len(sequences)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    ) * tile_tokens
    tile_lens = np.minimum(query_lens[sequences] - firsts, tile_tokens)
    tile_rows = query_start_loc[sequences] + firsts
    tile_positions = (seq_lens - query_lens)[sequences] + firsts
    tile_ends = tile_positions + tile_lens
    first_blocks = np.zeros_like(tile_ends)
    if sliding_window is not None:
        first_blocks = np.maximum(tile_positions - sliding_window + 1, 0) // block_size
    last_blocks = (tile_ends - 1) // block_size
    chunk_sizes = np.where(tile_lens > 1, max(1, chunk_blocks // 2), chunk_blocks)
    num_chunks = -(-(last_blocks + 1 - first_blocks) // chunk_sizes)
    tiles = np.repeat(np.arange(len(sequences)), num_chunks)
    chunks = np.arange(len(tiles)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    blocks = first_blocks[tiles] + chunks * chunk_sizes[tiles]
    num_blocks = np.minimum(last_blocks[tiles] + 1 - blocks, chunk_sizes[tiles])
    kinds = _find_power(tile_lens[tiles]) * 64 + _find_power(num_blocks)
    for kind in np.unique(kinds):
        members = np.flatnonzero(kinds == kind)
        chosen = tiles[members]
        offsets = np.minimum(np.arange(tile_lens[chosen].max()), tile_lens[chosen, None] - 1)
        columns = np.arange(num_blocks[members].max())
        columns = np.where(columns < num_blocks[members, None], columns, 0) + blocks[members, None]
        starts = blocks[members] * block_size
        parts = (
            tile_rows[chosen, None] + offsets,
            tile_positions[chosen, None] + offsets,
            tile_lens[chosen],
            block_tables[sequences[chosen, None], columns],
            starts,
            np.minimum(tile_ends[chosen], starts + num_blocks[members] * block_size),
        )
        step = max(1, max_blocks // columns.shape[1])
        for start in range(0, len(members), step):
            yield ItemBatch(*(part[start : start + step] for part in parts))


def _find_power(counts: IntArray) -> IntArray:
    """The exponent of the smallest power of two that is not below each count."""
    return np.ceil(np.log2(counts)).astype(np.int64)
