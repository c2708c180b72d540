"""`PagedCache`: a transformers cache with keys and values in the pool's blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from kv_pool.errors import InvalidArgumentError
from kv_pool.integrations.transformers.batch import PagedBatch
from kv_pool.integrations.transformers.sequences import PagedSequences
from kv_pool.manager.requests.request import Request

ATTENTION_NAME = "kv_pool"
"""Name of the attention over blocks in transformers, for `model.set_attn_implementation`."""


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"{name}() is not supported for rows that share blocks: fork, free or migrate by PagedSequences"
        )

    return refuse


class PagedLayer(CacheLayerMixin):  # type: ignore[misc] # transformers has no types where it is not installed
    """The keys and values of one layer for the rows of a batch."""

    is_sliding = False

    def __init__(self, batch: PagedBatch, layer: int, gathers: bool) -> None:
        super().__init__()
        self._batch = batch
        self._layer = layer
        self._gathers = gathers

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the storage is already allocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of the new tokens into their blocks.

        Args:
            key_states, value_states: (num_rows, num_kv_heads, width, head_size).
        Returns:
            K and V of all tokens, (num_rows, num_kv_heads, longest row, head_size); only the new ones if
            attention reads the blocks itself.
        """
        if self._layer == 0:
            self._batch.begin(key_states.shape[0], key_states.shape[2])
        self._batch.write(self._layer, key_states, value_states)
        found = self._batch.read(self._layer) if self._gathers else (key_states, value_states)
        if self._layer == self._batch.sequences.storage.num_layers - 1:
            self._batch.end()
        return found

    def get_seq_length(self) -> int:
        return self._batch.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._batch.count_context(query_length), 0

    def get_max_length(self) -> int:
        return -1

    reset = _refuse("reset")
    crop = _refuse("crop")
    reorder_cache = _refuse("reorder_cache")
    batch_repeat_interleave = _refuse("batch_repeat_interleave")
    batch_select_indices = _refuse("batch_select_indices")
    offload = _refuse("offload")


class PagedCache(Cache):  # type: ignore[misc]
    """A cache with keys and values in the pool's blocks: the argument `cache` of an unmodified model.

    With `generate`, for one request or several of equal length:

        sequences.admit(request)                                 # a cached prefix is not computed again
        output = model.generate(torch.tensor([request.all_token_ids]),
                                cache=PagedCache(sequences, [request]))
        request.append_output_token_ids(output[0, request.num_prompt_tokens:].tolist())
        sequences.note_computed(request, request.num_computed_tokens)    # caches the generated tokens

    In an engine's step, for rows of any lengths, with a new cache per step, since rows change:

        cache = PagedCache(sequences, requests, num_new_tokens)
        logits = model(**cache.make_inputs()).logits             # row i: its tokens, then padding

    Args:
        sequences, requests, num_new_tokens, num_beams: see `PagedBatch`.
        gathers: True supports any attention implementation, on copies of the rows' K and V. False requires
            the model's attention to be `ATTENTION_NAME`, which reads the blocks.

    Blocks may be moved, shared, evicted and migrated while no forward pass is running; each pass looks up its
    slots in its first layer. Assisted decoding is rejected because it crops rows, and `use_cache=False`
    because it feeds computed tokens again.

    With beam search, whose beams share blocks:

        cache = PagedCache(sequences, [request], num_beams=4)
        output = model.generate(torch.tensor([request.all_token_ids]), cache=cache, num_beams=4)
        cache.free()
    """

    def __init__(
        self,
        sequences: PagedSequences,
        requests: Sequence[Request],
        num_new_tokens: Sequence[int] | None = None,
        *,
        gathers: bool = True,
        num_beams: int = 1,
    ) -> None:
        self.batch = PagedBatch(sequences, requests, num_new_tokens, num_beams)
        self.gathers = gathers
        super().__init__(
            layers=[PagedLayer(self.batch, layer, gathers) for layer in range(sequences.storage.num_layers)]
        )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue row i from row `beam_idx[i]`: see `PagedBatch.reorder`."""
        self.batch.reorder(beam_idx.tolist())

    def free(self) -> None:
        """Release the blocks of all rows, including beams. The requests can be admitted again."""
        self.batch.free()

    def make_inputs(self) -> dict[str, Any]:
        """Return the model's arguments to compute the next `num_new_tokens` tokens of each row.

        Returns:
            input_ids, position_ids: (num_rows, width), int64; short rows are padded with their last token.
            attention_mask: (num_rows, 1, width, longest row), the storage's dtype: 0 for visible tokens.
            cache: this cache; also paged_cache if attention reads the blocks.
        Raises:
            InvalidArgumentError: the cache has no `num_new_tokens`, or a row has fewer tokens.
        """
        counts = self.batch.num_new_tokens
        if counts is None:
            raise InvalidArgumentError("pass num_new_tokens to make inputs: generate() makes its own")
        storage = self.batch.sequences.storage
        dtype = getattr(torch, storage.dtype)
        width = max(counts)
        input_ids, positions = [], []
        for request, count in zip(self.batch.requests, counts, strict=True):
            start = request.num_computed_tokens
            if start + count > request.num_tokens:
                raise InvalidArgumentError(
                    f"request {request.request_id!r} has {request.num_tokens} tokens, {start} of them "
                    f"computed: fewer than {count} are new"
                )
            padding = width - count
            token_ids = request.all_token_ids[start : start + count]
            input_ids.append(token_ids + token_ids[-1:] * padding)
            positions.append([*range(start, start + count), *[start + count - 1] * padding])
        position_ids = torch.tensor(positions, device=storage.device)
        context = torch.arange(self.batch.count_context(width), device=storage.device)
        unseen = context > position_ids[:, None, :, None]
        mask = torch.zeros(unseen.shape, dtype=dtype, device=storage.device)
        inputs = {
            "input_ids": torch.tensor(input_ids, device=storage.device),
            "position_ids": position_ids,
            "attention_mask": mask.masked_fill(unseen, torch.finfo(dtype).min),
            "cache": self,
        }
        return inputs if self.gathers else {**inputs, "paged_cache": self}


def attend_over_blocks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_cache: PagedCache | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention over `paged_cache`, an argument of the model's call. For transformers.

    `key` and `value` are ignored: they are in the blocks already. The mask is always the causal one.

    Returns:
        (num_rows, width, num_heads, head_size), and None for the weights.
    Raises:
        InvalidArgumentError: there is no such cache, or it gathers.
    """
    if paged_cache is None or paged_cache.gathers:
        raise InvalidArgumentError(
            f"attention {ATTENTION_NAME!r} reads blocks: call the model with PagedCache(..., gathers=False)"
            ".make_inputs()"
        )
    return paged_cache.batch.attend(module.layer_idx, query, scaling), None


AttentionInterface.register(ATTENTION_NAME, attend_over_blocks)
