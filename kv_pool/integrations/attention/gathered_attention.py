"""Attention over blocks in torch's operations: gather a few MiB of blocks, attend over them, merge."""

from __future__ import annotations

from math import gcd, prod

import numpy as np
import torch

from kv_pool.integrations.attention.work_items import IntArray, ItemBatch, iterate_items

CHUNK_TOKENS = 1024
TILE_TOKENS = 256
BATCH_BYTES = 4 * 1024 * 1024
"""K and V of a batch of items. They are written and read again at once, so they should fit in a cache."""

MERGE_ELEMENTS = 4 * 1024 * 1024
"""Elements of results that are collected before they are summed."""

# For scores that must not count: finite, so that a query token which sees nothing of a chunk gets a weight of
# 0 when chunks are merged, and not NaN.
_UNSEEN = -1e30


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
    block_bytes = 2 * block_size * num_kv_heads * head_size * query.dtype.itemsize
    gather = _BlockGather(key_cache, value_cache)
    query_groups = query.reshape(num_tokens, num_kv_heads, group, head_size)
    merge = _Merge(query_groups)
    for items in iterate_items(
        block_tables,
        seq_lens,
        query_start_loc,
        block_size,
        tile_tokens=TILE_TOKENS,
        chunk_blocks=max(1, CHUNK_TOKENS // block_size),
        max_blocks=max(1, BATCH_BYTES // block_bytes),
        sliding_window=sliding_window,
    ):
        num_items, num_rows = items.rows.shape
        key, value = gather(items.block_ids)
        mask = _mask_unseen(items, key, value, block_size, group, sliding_window)
        rows = torch.from_numpy(items.rows.reshape(-1)).to(query.device)
        found = query_groups.index_select(0, rows).view(num_items, num_rows, num_kv_heads, group, head_size)
        attended, logs = _attend(found.transpose(1, 2).flatten(2, 3), key, value, mask, scale)
        attended = attended.unflatten(2, (num_rows, group)).transpose(1, 2).flatten(0, 1)
        logs = logs.unflatten(2, (num_rows, group)).transpose(1, 2).flatten(0, 1)
        if (items.num_rows < num_rows).any():
            is_row = torch.from_numpy((np.arange(num_rows) < items.num_rows[:, None]).reshape(-1))
            is_row = is_row.to(query.device)
            rows, attended, logs = rows[is_row], attended[is_row], logs[is_row]
        merge.add(rows, attended, logs)
    return merge.finish().view(query.shape)


class _Merge:
    """Softmax over chunks: sums of results, each weighted by the exponentials of its scores.

    Results are collected, and summed a few MiB at a time: a sum takes several operations.
    """

    def __init__(self, query_groups: torch.Tensor) -> None:
        self._dtype = query_groups.dtype
        wide = torch.promote_types(self._dtype, torch.float32)
        self._sums = torch.zeros_like(query_groups, dtype=wide, memory_format=torch.contiguous_format)
        self._weights = torch.zeros_like(self._sums[..., 0])
        self._highest = torch.full_like(self._weights, torch.finfo(wide).min)
        self._added: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._num_elements = 0

    def add(self, rows: torch.Tensor, attended: torch.Tensor, logs: torch.Tensor) -> None:
        """Results of query tokens `rows`, (num_rows,), and the logarithms of their sums of exponentials."""
        self._added.append((rows, attended, logs))
        self._num_elements += attended.numel()
        if self._num_elements > MERGE_ELEMENTS:
            self._sum()

    def finish(self) -> torch.Tensor:
        if self._added:
            self._sum()
        return (self._sums / self._weights[..., None]).to(self._dtype)

    def _sum(self) -> None:
        rows, attended, logs = (torch.cat(parts) for parts in zip(*self._added, strict=True))
        logs = logs.to(self._sums.dtype)
        index = rows[:, None, None].expand_as(logs)
        highest = self._highest.scatter_reduce(0, index, logs, "amax")
        fade = (self._highest - highest).exp_()
        weights = (logs - highest.index_select(0, rows)).exp_()
        self._sums.mul_(fade[..., None]).index_add_(0, rows, attended * weights[..., None])
        self._weights.mul_(fade).index_add_(0, rows, weights)
        self._highest = highest
        self._added.clear()
        self._num_elements = 0


class _BlockGather:
    """Gathers K and V of blocks, by whole spans of memory, into buffers that are used again.

    Heads may lie inside of tokens (NHD: a block is one row) or outside (HND: a row is a block of one head).
    """

    def __init__(self, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
        self._num_heads = key_cache.shape[2]
        self._block_size = key_cache.shape[1]
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
        self._by_head = self._num_heads > 1 and strides[2] > strides[1]
        self._units = [0, 0]
        if self._by_head:
            caches = [self._view_by_head(cache) for cache in caches]
        self._caches = caches
        self._buffers = [cache.new_empty(0) for cache in caches]

    def __call__(self, block_ids: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """(num_items, num_kv_heads, blocks * block_size, head_size) each; overwritten by the next call."""
        num_items, num_blocks = block_ids.shape
        if self._by_head:
            heads = np.arange(self._num_heads)[:, None]
            block_ids = block_ids[:, None] * self._units[0] + heads * self._units[1]
        rows = torch.from_numpy(block_ids.reshape(-1)).to(self._caches[0].device)
        found = []
        for number, cache in enumerate(self._caches):
            shape = (len(rows), *cache.shape[1:])
            if self._buffers[number].numel() < prod(shape):
                self._buffers[number] = cache.new_empty(prod(shape))
            buffer = self._buffers[number][: prod(shape)].view(shape)
            torch.index_select(cache, 0, rows, out=buffer)
            num_tokens = num_blocks * self._block_size
            if self._by_head:
                found.append(buffer.view(num_items, self._num_heads, num_tokens, -1))
            else:
                found.append(buffer.view(num_items, num_tokens, self._num_heads, -1).transpose(1, 2))
        if self._is_joint:
            return found[0][..., : self._head_size], found[0][..., self._head_size :]
        return found[0], found[1]

    def _view_by_head(self, cache: torch.Tensor) -> torch.Tensor:
        """(num_rows, block_size, head_size): a head of a block is row block * units[0] + head * units[1]."""
        num_blocks, block_size, num_heads, width = cache.shape
        block_stride, token_stride, head_stride, _ = cache.stride()
        unit = gcd(block_stride, head_stride)
        self._units = [block_stride // unit, head_stride // unit]
        num_rows = (num_blocks - 1) * self._units[0] + (num_heads - 1) * self._units[1] + 1
        return cache.as_strided((num_rows, block_size, width), (unit, token_stride, 1))


def _mask_unseen(
    items: ItemBatch,
    key: torch.Tensor,
    value: torch.Tensor,
    block_size: int,
    group: int,
    sliding_window: int | None,
) -> torch.Tensor | None:
    """What is added to scores: (num_items, 1, query tokens * group, tokens); None where all is seen.

    K and V of slots that were never written become zeros: a NaN among them would not be masked.
    """
    num_tokens = key.shape[2]
    last_positions = items.starts + num_tokens - 1
    oldest_seen = 0 if sliding_window is None else items.positions[:, -1] - sliding_window + 1
    if (last_positions <= items.positions[:, 0]).all() and (items.starts >= oldest_seen).all():
        return None
    offsets = np.arange(num_tokens)
    lengths = (items.ends - items.starts)[:, None]
    held = np.where(offsets < -(-lengths // block_size) * block_size, offsets, offsets % block_size)
    item, slot = (torch.from_numpy(found).to(key.device) for found in (held >= lengths).nonzero())
    if len(item):
        key[item, :, slot] = value[item, :, slot] = 0
    positions = items.starts[:, None] + offsets
    is_seen = positions[:, None] <= items.positions[:, :, None]
    if sliding_window is not None:
        is_seen &= positions[:, None] > items.positions[:, :, None] - sliding_window
    unseen = torch.from_numpy(~is_seen).to(key.device)
    mask = key.new_zeros(unseen.shape)
    mask.masked_fill_(unseen, max(_UNSEEN, torch.finfo(key.dtype).min))
    return mask.repeat_interleave(group, 1)[:, None]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the logarithm of the sum of exponentials of each row's scores."""
    if query.device.type == "cpu":
        # What scaled_dot_product_attention calls on a CPU; that one does not return the logarithms.
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 # see above
        attended, logs = flash(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
        return attended, logs
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * scale
    if mask is not None:
        scores += mask
    logs = scores.logsumexp(-1)
    return (scores - logs[..., None]).exp_() @ value.to(wide), logs
