"""Attention over blocks in torch's operations: gather 1 or 2 MiB of a sequence's blocks, attend, merge."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]

TILE_TOKENS = 256
"""Query tokens of a sequence that are computed together."""

CHUNK_ELEMENTS = 512 * 1024
"""Elements of K and V that are gathered at a time: 2 MiB in float32, 1 MiB in half precision. A larger chunk
leaves the processor's caches; in a smaller one, the calls take longer than the work."""

MAX_PARTS = 8
"""Results of a tile that are kept before they are merged: memory does not grow with the context."""

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

        blocks that a tile of query tokens sees:   |  chunk  |  chunk  |  rest  | last, masked |
                                                   ^ window begins               ^ first query token

    The query heads of a KV head are rows of one matrix, so K and V are not repeated for them. A tile of one
    token sees all that is gathered for it, and needs no mask.
    """
    block_size, num_kv_heads, head_size = key_cache.shape[1:]
    chunk_blocks = max(1, CHUNK_ELEMENTS // (2 * block_size * num_kv_heads * head_size))
    gather = _BlockGather(key_cache, value_cache, chunk_blocks)
    groups = query.unflatten(1, (num_kv_heads, -1))
    output = torch.empty_like(groups, memory_format=torch.contiguous_format)
    tables = torch.from_numpy(np.ascontiguousarray(block_tables)).to(query.device)
    starts = query_start_loc.tolist()
    for row, (table, seq_len) in enumerate(zip(tables, seq_lens.tolist(), strict=True)):
        for first in range(starts[row], starts[row + 1], TILE_TOKENS):
            tile = groups[first : min(first + TILE_TOKENS, starts[row + 1])]
            position = seq_len - starts[row + 1] + first  # of the tile's first token
            end = position + len(tile)
            begin = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            block = begin // block_size
            num_blocks = -(-end // block_size)
            num_unmasked = (position + 1) // block_size if len(tile) > 1 else num_blocks
            rows = tile.transpose(0, 1).flatten(1, 2)[None]
            parts = []
            while block < num_blocks:
                limit = num_unmasked if block < num_unmasked else num_blocks
                stop = min(block + chunk_blocks, limit)
                key, value = gather(table[block:stop])
                low, high = max(begin, block * block_size), min(end, stop * block_size)
                if high - low < key.shape[2]:
                    seen = slice(low - block * block_size, high - block * block_size)
                    key, value = key[:, :, seen], value[:, :, seen]
                mask = None
                if len(tile) > 1 and (stop > num_unmasked or sliding_window is not None):
                    mask = _mask_unseen(tile, low - position, high - position, sliding_window)
                parts.append(_attend(rows, key, value, mask, scale))
                if len(parts) == MAX_PARTS:
                    parts = [_merge(parts)]
                block = stop
            attended, _ = _merge(parts)
            output[first : first + len(tile)] = attended[0].unflatten(1, (len(tile), -1)).transpose(0, 1)
    return output.view(query.shape)


def _mask_unseen(tile: torch.Tensor, low: int, high: int, sliding_window: int | None) -> torch.Tensor:
    """Return what to add to the scores of tokens `[low, high)`, counted from the tile's first token."""
    places = torch.arange(low, high, device=tile.device)
    tokens = torch.arange(len(tile), device=tile.device)[:, None]
    is_unseen = places > tokens
    if sliding_window is not None:
        is_unseen |= places <= tokens - sliding_window
    mask = tile.new_zeros(is_unseen.shape)
    mask.masked_fill_(is_unseen, max(_UNSEEN, torch.finfo(tile.dtype).min))
    return mask.repeat_interleave(tile.shape[2], 0)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of (1, heads, rows, size), and the logarithm of each row's sum of exponentials of scores."""
    if query.device.type == "cpu":
        attended, logs = _flash(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
        return attended, logs
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * scale
    if mask is not None:
        scores += mask
    logs = scores.logsumexp(-1)
    return (scores - logs[..., None]).exp_() @ value.to(wide), logs


def _merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over chunks: the sum of their results, each weighted by the exponentials of its scores.

    Returns:
        The sum, and the logarithm of each row's sum of exponentials, as `_attend` does for a chunk.
    """
    if len(parts) == 1:
        return parts[0]
    logs = torch.stack([part_logs for _, part_logs in parts])
    weights = logs.softmax(0)[..., None]
    merged = torch.zeros_like(parts[0][0], dtype=weights.dtype)
    for (attended, _), weight in zip(parts, weights, strict=True):
        merged.addcmul_(attended.to(weights.dtype), weight)
    return merged, logs.logsumexp(0)


class _BlockGather:
    """Gathers K and V of blocks into buffers that are used again, and keeps the order of heads and tokens.

    Heads may lie inside of tokens (NHD) or outside (HND): a block is then copied head by head.
    """

    def __init__(self, key_cache: torch.Tensor, value_cache: torch.Tensor, max_blocks: int) -> None:
        self._head_size = head_size = key_cache.shape[3]
        caches = [key_cache, value_cache]
        strides = key_cache.stride()
        if (
            key_cache.untyped_storage().data_ptr() == value_cache.untyped_storage().data_ptr()
            and value_cache.storage_offset() - key_cache.storage_offset() == head_size
            and strides == value_cache.stride()
        ):  # K and V of a head side by side
            caches = [key_cache.as_strided((*key_cache.shape[:3], 2 * head_size), strides)]
        self._by_head = strides[2] > strides[1]
        self._caches = [cache.transpose(1, 2) for cache in caches] if self._by_head else caches
        self._firsts = [cache[:, 0, 0, 0] for cache in caches]
        self._buffers = [
            _keep_buffer(cache, number, max_blocks * cache[0].numel()) for number, cache in enumerate(caches)
        ]
        self._touched = key_cache.new_empty(max_blocks)
        self._views: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def __call__(self, block_ids: torch.Tensor) -> list[torch.Tensor]:
        """K and V of blocks, (1, num_kv_heads, blocks * block_size, head_size) each, until the next call."""
        num_blocks = len(block_ids)
        views = self._views.get(num_blocks)
        if views is None:
            views = self._views[num_blocks] = self._make_views(num_blocks)
        targets, key_value = views
        touched = self._touched[:num_blocks]
        for cache, firsts, target in zip(self._caches, self._firsts, targets, strict=True):
            # The first loads of all blocks overlap; the copies would wait for each.
            torch.index_select(firsts, 0, block_ids, out=touched)
            torch.index_select(cache, 0, block_ids, out=target)
        return key_value

    def _make_views(self, num_blocks: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return where blocks are gathered to, and their K and V there."""
        targets, found = [], []
        for cache, buffer in zip(self._caches, self._buffers, strict=True):
            _, *sizes, width = cache.shape
            used = buffer[: num_blocks * cache[0].numel()]
            if self._by_head:
                gathered = used.view(sizes[0], num_blocks, sizes[1], width)
                targets.append(gathered.transpose(0, 1))
                found.append(gathered.flatten(1, 2)[None])
            else:
                targets.append(used.view(num_blocks, *sizes, width))
                found.append(targets[-1].flatten(0, 1).transpose(0, 1)[None])
        return targets, found if len(found) == 2 else list(found[0].split(self._head_size, -1))


def _keep_buffer(cache: torch.Tensor, number: int, num_elements: int) -> torch.Tensor:
    """Memory that the thread's next call uses again: fresh memory costs a page fault for each 4 KiB."""
    kept = _kept.__dict__
    key = f"{cache.dtype} {cache.device} {number}"
    if key not in kept or kept[key].numel() < num_elements:
        with torch.inference_mode(False):  # a buffer made in that mode could not be written outside of it
            kept[key] = cache.new_empty(num_elements)
    buffer: torch.Tensor = kept[key]
    return buffer
