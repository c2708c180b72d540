"""Attention over blocks in torch's operations: gather 1 or 2 MiB of blocks, attend over them, merge."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]

TILE_TOKENS = 256
BATCH_ELEMENTS = 512 * 1024
"""Elements of K and V that are gathered for one batch of items: 2 MiB in float32, 1 MiB in half precision.
A larger batch leaves the processor's caches; in a smaller one, the calls take longer than the work."""

MERGE_ELEMENTS = 512 * 1024
"""Elements of results that are collected before they are summed."""

# For scores that must not count: finite, so that a query token which sees nothing of a chunk gets a weight of
# 0 when chunks are merged, and not NaN.
_UNSEEN = -1e30

_kept = threading.local()

# What scaled_dot_product_attention calls on a CPU; that one does not return the logarithms.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 # see above


def attend_gathered(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: IntArray,
    seq_lens: IntArray,
    query_start_loc: IntArray,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """See `paged_attention`; arguments are checked.

    The query heads of a KV head are rows of one matrix, so K and V are not repeated for them.
    """
    num_tokens, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = num_heads // num_kv_heads
    batch_blocks = BATCH_ELEMENTS // (2 * block_size * num_kv_heads * head_size)
    batch_blocks = 1 << max(1, batch_blocks).bit_length() - 1  # a power of two
    gather = _BlockGather(key_cache, value_cache, batch_blocks)
    query_groups = query.reshape(num_tokens, num_kv_heads, group, head_size)
    merge = _Merge(query_groups)
    for items in iterate_items(
        block_tables,
        seq_lens,
        query_start_loc,
        block_size,
        tile_tokens=TILE_TOKENS,
        chunk_blocks=batch_blocks,
        max_rows=min(MERGE_ELEMENTS // (num_heads * head_size), 4 * TILE_TOKENS),
        sliding_window=sliding_window,
    ):
        num_items, num_rows = items.rows.shape
        rows = torch.from_numpy(items.rows.reshape(-1)).to(query.device)
        found = query_groups.index_select(0, rows).unflatten(0, (num_items, num_rows))
        found = found.transpose(1, 2).flatten(2, 3)
        step = batch_blocks // items.block_ids.shape[1]
        block_ids = torch.from_numpy(items.block_ids).to(query.device)
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for some, ids in zip(found.split(step), block_ids.split(step), strict=True):
            key, value = gather(ids)
            mask = None
            if not items.is_whole:
                start = len(parts) * step
                mask = _mask_unseen(items.take(start, start + step), key, value, group, sliding_window)
            parts.append(_attend(some, key, value, mask, scale))
        attended, logs = (
            torch.cat(part).unflatten(2, (-1, group)).transpose(1, 2).flatten(0, 1)
            for part in zip(*parts, strict=True)
        )
        if (items.num_rows < num_rows).any():
            is_row = torch.from_numpy((np.arange(num_rows) < items.num_rows[:, None]).reshape(-1))
            is_row = is_row.to(query.device)
            rows, attended, logs = rows[is_row], attended[is_row], logs[is_row]
        merge.add(rows, attended, logs)
    return merge.finish().view(query.shape)


class _Merge:
    """Softmax over chunks: sums of results, each weighted by the exponentials of its scores."""

    def __init__(self, query_groups: torch.Tensor) -> None:
        self._dtype = query_groups.dtype
        wide = torch.promote_types(self._dtype, torch.float32)
        self._sums = torch.zeros_like(query_groups, dtype=wide, memory_format=torch.contiguous_format)
        self._weights = torch.zeros_like(self._sums[..., 0])
        self._highest = torch.full_like(self._weights, torch.finfo(wide).min)

    def add(self, rows: torch.Tensor, attended: torch.Tensor, logs: torch.Tensor) -> None:
        """Results of query tokens `rows`, (num_rows,), and the logarithms of their sums of exponentials."""
        first = int(rows.min())
        span = slice(first, int(rows.max()) + 1)
        rows = rows - first
        logs = logs.to(self._sums.dtype)
        highest = self._highest[span].scatter_reduce(0, rows[:, None, None].expand_as(logs), logs, "amax")
        fade = (self._highest[span] - highest).exp_()
        weights = (logs - highest.index_select(0, rows)).exp_()
        weighted = attended.to(self._sums.dtype).mul_(weights[..., None])
        self._sums[span].mul_(fade[..., None]).index_add_(0, rows, weighted)
        self._weights[span].mul_(fade).index_add_(0, rows, weights)
        self._highest[span] = highest

    def finish(self) -> torch.Tensor:
        return self._sums.div_(self._weights[..., None]).to(self._dtype)


class _BlockGather:
    """Gathers K and V of blocks into buffers that are used again, and keeps the order of heads and tokens.

    Heads may lie inside of tokens (NHD) or outside (HND): a block is then copied head by head.
    """

    def __init__(self, key_cache: torch.Tensor, value_cache: torch.Tensor, max_blocks: int) -> None:
        self._head_size = head_size = key_cache.shape[3]
        caches = [key_cache, value_cache]
        strides = key_cache.stride()
        self._is_joint = (
            key_cache.untyped_storage().data_ptr() == value_cache.untyped_storage().data_ptr()
            and value_cache.storage_offset() - key_cache.storage_offset() == head_size
            and strides == value_cache.stride()
        )
        if self._is_joint:  # K and V of a head side by side
            caches = [key_cache.as_strided((*key_cache.shape[:3], 2 * head_size), strides)]
        self._by_head = strides[2] > strides[1]
        if self._by_head:
            caches = [cache.transpose(1, 2) for cache in caches]
        self._caches = caches
        self._buffers = [
            _keep_buffer(cache, number, max_blocks * cache[0].numel()) for number, cache in enumerate(caches)
        ]
        self._touched = key_cache.new_empty(max_blocks)
        self._views: dict[torch.Size, _Views] = {}

    def __call__(self, block_ids: torch.Tensor) -> list[torch.Tensor]:
        """K and V of blocks (num_items, blocks), overwritten by the next call.

        Returns:
            (num_items, num_kv_heads, blocks * block_size, head_size) each.
        """
        views = self._views.get(block_ids.shape)
        if views is None:
            views = self._views[block_ids.shape] = self._make_views(*block_ids.shape)
        block_ids = block_ids.view(-1)
        for cache, firsts, gathered in views.copies:
            # The first loads of all blocks overlap; the copies would wait for each.
            torch.index_select(firsts, 0, block_ids, out=views.touched)
            torch.index_select(cache, 0, block_ids, out=gathered)
        return views.key_value

    def _make_views(self, num_items: int, num_blocks: int) -> _Views:
        copies, found = [], []
        for cache, buffer in zip(self._caches, self._buffers, strict=True):
            _, *sizes, width = cache.shape
            used = buffer[: num_items * num_blocks * cache[0].numel()]
            if self._by_head:
                gathered = used.view(sizes[0], -1, sizes[1], width).transpose(0, 1)
                found.append(used.view(sizes[0], num_items, -1, width).transpose(0, 1))
            else:
                gathered = used.view(-1, *sizes, width)
                found.append(used.view(num_items, -1, sizes[1], width).transpose(1, 2))
            copies.append((cache, cache[:, 0, 0, 0], gathered))
        if self._is_joint:
            found = list(found[0].split(self._head_size, -1))
        return _Views(self._touched[: num_items * num_blocks], copies, found)


def _keep_buffer(cache: torch.Tensor, number: int, num_elements: int) -> torch.Tensor:
    """Memory that the thread's next call uses again: fresh memory costs a page fault for each 4 KiB."""
    kept = _kept.__dict__
    key = f"{cache.dtype} {cache.device} {number}"
    if key not in kept or kept[key].numel() < num_elements:
        with torch.inference_mode(False):  # a buffer made in that mode could not be written outside of it
            kept[key] = cache.new_empty(num_elements)
    buffer: torch.Tensor = kept[key]
    return buffer


@dataclass(frozen=True)
class _Views:
    """Views of a gather's buffers, for batches of one shape.

    Attributes:
        copies: caches, the first element of each of their blocks, and where blocks are gathered to.
        key_value: K and V of the items.
    """

    touched: torch.Tensor
    copies: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    key_value: list[torch.Tensor]


def _mask_unseen(
    items: ItemBatch, key: torch.Tensor, value: torch.Tensor, group: int, sliding_window: int | None
) -> torch.Tensor:
    """Return the mask to add to scores: (num_items or 1, 1, query tokens * group, tokens).

    K and V of slots that were never written become zeros: a NaN among them would not be masked.
    """
    num_tokens = key.shape[2]
    block_size = num_tokens // items.block_ids.shape[1]
    offsets = np.arange(num_tokens)
    lengths = (items.ends - items.starts)[:, None]
    held = np.where(offsets < -(-lengths // block_size) * block_size, offsets, offsets % block_size)
    item, slot = (torch.from_numpy(found).to(key.device) for found in (held >= lengths).nonzero())
    if len(item):
        key[item, :, slot] = value[item, :, slot] = 0
    position = (items.positions - items.starts[:, None])[..., None]
    if (position == position[0]).all() and (lengths == lengths[0]).all():  # one mask for all, as in prompts
        position, lengths = position[:1], lengths[:1]
    is_unseen = (offsets > position) | (offsets >= lengths[..., None])
    if sliding_window is not None:
        is_unseen |= offsets <= position - sliding_window
    unseen = torch.from_numpy(is_unseen.repeat(group, 1)[:, None]).to(key.device)
    return key.new_zeros(unseen.shape).masked_fill_(unseen, max(_UNSEEN, torch.finfo(key.dtype).min))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the logarithm of the sum of exponentials of each row's scores."""
    if query.device.type == "cpu":
        attended, logs = _flash(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
        return attended, logs
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * scale
    if mask is not None:
        scores += mask
    logs = scores.logsumexp(-1)
    return (scores - logs[..., None]).exp_() @ value.to(wide), logs


# ---- sequences of any lengths, cut into pieces of equal shape that are computed together ------------------


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
