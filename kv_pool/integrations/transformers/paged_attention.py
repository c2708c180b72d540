"""`paged_attention`: causal attention that reads K and V from blocks, in torch's plain operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kv_pool.errors import InvalidArgumentError
from kv_pool.manager.positions import BlockIds, list_slots
from kv_pool.storage.kv_storage import KVStorage


def paged_attention(
    query: torch.Tensor,
    storage: KVStorage,
    layer: int,
    block_tables: Sequence[BlockIds],
    context_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of each sequence's last tokens over all its tokens, whose K and V are in the storage.

        |<------------ context_lens[i] ------------>|
        |  computed before  |<-- query_lens[i] ---->|   token j of these sees itself and all before it

    Args:
        query: (sum of query_lens, num_heads, head_size), the sequences one after another, on the storage's
            device. num_heads is a multiple of the storage's num_kv_heads; query head h reads
            K and V of head h // (num_heads // num_kv_heads).
        layer: of the storage.
        block_tables: one a sequence; a row may be longer than its sequence needs.
        context_lens: tokens of each sequence with K and V, those of the query included.
        query_lens: 1 each by default: decode. Equal to context_lens: prefill. Between: a chunk, or a
            prompt with a cached prefix.
        scale: what scores are multiplied with; 1 / sqrt(head_size) by default.
    Returns:
        Same shape, dtype and device as `query`. Scores are summed in float32 or wider.
    Raises:
        InvalidArgumentError: lists of different lengths, a query longer than its context or that does not
            add up, heads that do not divide, or a latent cache.

    One sequence at a time: it shows what a kernel has to compute, and is no kernel.
    Cost: O(query tokens * context) a sequence, and a copy of its K and V of one layer.
    """
    if query_lens is None:
        query_lens = [1] * len(context_lens)
    _check_lens(query, block_tables, context_lens, query_lens)
    num_heads, head_size = query.shape[1:]
    num_kv_heads = storage.num_kv_heads
    if not storage.has_values or num_heads % num_kv_heads or head_size != storage.head_size:
        raise InvalidArgumentError(
            f"{num_heads} query heads of {head_size} do not fit the storage's {num_kv_heads} heads of "
            f"{storage.head_size}{'' if storage.has_values else ', which has no values'}"
        )
    if scale is None:
        scale = head_size**-0.5
    wide = torch.promote_types(query.dtype, torch.float32)
    output = torch.empty_like(query)
    start = 0
    for block_ids, context_len, query_len in zip(block_tables, context_lens, query_lens, strict=True):
        slots = list_slots(block_ids, 0, context_len, storage.block_size)
        key, value = (torch.as_tensor(found).to(wide) for found in storage.read(layer, slots))
        grouped = query[start : start + query_len].to(wide).unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("qhgd,khd->hgqk", grouped, key) * scale
        positions = torch.arange(context_len, device=query.device)
        unseen = positions > positions[context_len - query_len :, None]
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        attended = torch.einsum("hgqk,khd->qhgd", weights, value)
        output[start : start + query_len] = attended.flatten(1, 2)
        start += query_len
    return output


def _check_lens(
    query: torch.Tensor,
    block_tables: Sequence[BlockIds],
    context_lens: Sequence[int],
    query_lens: Sequence[int],
) -> None:
    if not len(block_tables) == len(context_lens) == len(query_lens):
        raise InvalidArgumentError(
            f"{len(block_tables)} block tables, {len(context_lens)} contexts and {len(query_lens)} queries: "
            "there is one of each a sequence"
        )
    for row, (context_len, query_len) in enumerate(zip(context_lens, query_lens, strict=True)):
        if not 0 <= query_len <= context_len:
            raise InvalidArgumentError(
                f"sequence {row} has a query of {query_len} tokens in a context of {context_len}; a query is "
                "the end of its context"
            )
    if query.ndim != 3 or len(query) != sum(query_lens):
        raise InvalidArgumentError(
            f"query has shape {tuple(query.shape)}; it is (num_tokens, num_heads, head_size) with the "
            f"{sum(query_lens)} tokens of query_lens"
        )
