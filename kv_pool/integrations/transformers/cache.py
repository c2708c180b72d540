"""`PagedCache`: a transformers cache with keys and values in the pool's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, NoReturn
from weakref import proxy

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from kv_pool.errors import InvalidArgumentError, OutOfBlocksError
from kv_pool.ids import RequestId
from kv_pool.integrations.attention.paged_attention import paged_attention
from kv_pool.integrations.transformers.sequences import PagedSequences, pad_rows
from kv_pool.manager.requests.request import Request
from kv_pool.storage.sharded_storage import ShardedStorage


def make_beam(request: Request, number: int) -> Request:
    """Return an additional row of a request in beam search: the same tokens, and blocks under another id."""
    beam = copy(request)
    beam.request_id = RequestId(f"{request.request_id}, beam {number}")
    beam.num_computed_tokens = 0
    return beam


ATTENTION_NAME = "kv_pool"
"""Name of the attention over blocks in transformers, for `model.set_attn_implementation`."""


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"{name}() is not supported for rows that share blocks: fork, free or migrate by PagedSequences"
        )

    return refuse


class PagedLayer(CacheLayerMixin):  # type: ignore[misc] # transformers has no types where it is not installed
    """The keys and values of one layer for the rows of a cache, which is referenced weakly."""

    is_sliding = False

    def __init__(self, cache: PagedCache, layer: int) -> None:
        super().__init__()
        self._cache = proxy(cache)
        self._layer = layer

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
            self._cache.begin(key_states.shape[0], key_states.shape[2])
        self._cache.write(self._layer, key_states, value_states)
        found = self._cache.read(self._layer) if self._cache.gathers else (key_states, value_states)
        if self._layer == self._cache.sequences.storage.num_layers - 1:
            self._cache.end()
        return found

    def get_seq_length(self) -> int:
        num_tokens: int = self._cache.num_tokens
        return num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.count_context(query_length), 0

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

        row 0   |  computed  |  new  |            a prompt with a cached prefix
        row 1   |       computed       |1|pad|    a decoding sequence, padded to the width of the input

    Args:
        sequences: the sequences that own the blocks of the rows.
        requests: one per row, admitted.
        num_new_tokens: number of new tokens per row; required if it differs or rows have different lengths.
            By default every row has the whole width of the input.
        gathers: True supports any attention implementation, on copies of the rows' K and V. False requires
            the model's attention to be `ATTENTION_NAME`, which reads the blocks.
        num_beams: number of rows per request, for beam search. Until the first `reorder_cache` all of them
            are the request's prompt, computed once per beam and stored once.
    Raises:
        InvalidArgumentError: no rows, a row without new tokens, rows of different lengths without
            `num_new_tokens`, or beams with it.

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
        lengths = [request.num_computed_tokens for request in requests]
        if not lengths or (num_new_tokens is None and len(set(lengths)) > 1):
            raise InvalidArgumentError(
                f"rows have {lengths} computed tokens; a batch needs at least one row, and num_new_tokens if "
                "their lengths differ"
            )
        if num_new_tokens is not None and (len(num_new_tokens) != len(lengths) or min(num_new_tokens) < 1):
            raise InvalidArgumentError(f"{len(lengths)} rows have {list(num_new_tokens)} new tokens")
        if num_beams < 1 or (num_beams > 1 and num_new_tokens is not None):
            raise InvalidArgumentError(
                f"num_beams is {num_beams}; it must be at least 1, and 1 with num_new_tokens"
            )
        self.sequences = sequences
        self.num_beams = num_beams
        self._beams: list[list[Request]] = [
            [request, *(make_beam(request, number) for number in range(1, num_beams))] for request in requests
        ]
        self.requests = [request for request in requests for _ in range(num_beams)]
        self.num_new_tokens = None if num_new_tokens is None else list(num_new_tokens)
        self.gathers = gathers
        super().__init__(layers=[PagedLayer(self, layer) for layer in range(sequences.storage.num_layers)])

    def make_inputs(self) -> dict[str, Any]:
        """Return the model's arguments to compute the next `num_new_tokens` tokens of each row.

        Returns:
            input_ids, position_ids: (num_rows, width), int64; short rows are padded with their last token.
            attention_mask: (num_rows, 1, width, longest row), the storage's dtype: 0 for visible tokens.
            cache: this cache; also paged_cache if attention reads the blocks.
        Raises:
            InvalidArgumentError: the cache has no `num_new_tokens`, or a row has fewer tokens.
        """
        counts = self.num_new_tokens
        if counts is None:
            raise InvalidArgumentError("pass num_new_tokens to make inputs: generate() makes its own")
        storage = self.sequences.storage
        dtype = getattr(torch, storage.dtype)
        width = max(counts)
        input_ids, positions = [], []
        for request, count in zip(self.requests, counts, strict=True):
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
        context = torch.arange(self.count_context(width), device=storage.device)
        unseen = context > position_ids[:, None, :, None]
        mask = torch.zeros(unseen.shape, dtype=dtype, device=storage.device)
        inputs = {
            "input_ids": torch.tensor(input_ids, device=storage.device),
            "position_ids": position_ids,
            "attention_mask": mask.masked_fill(unseen, torch.finfo(dtype).min),
            "cache": self,
        }
        return inputs if self.gathers else {**inputs, "paged_cache": self}

    @property
    def num_tokens(self) -> int:
        """Number of computed tokens of the longest row."""
        return max(request.num_computed_tokens for request in self.requests)

    def count_new_tokens(self, width: int) -> list[int]:
        """Return the number of new tokens per row of an input with `width` columns."""
        if self.num_new_tokens is None:
            return [width] * len(self.requests)
        return self.num_new_tokens

    def count_context(self, width: int) -> int:
        """Return the number of tokens of the longest row after an input with `width` columns."""
        return max(self._list_ends(self.count_new_tokens(width)))

    def begin(self, num_rows: int, width: int) -> None:
        """Reserve and look up the slots of a forward pass. Called before the first layer.

        Raises:
            InvalidArgumentError: the input does not have the shape of the rows, or a row has several tokens
                that its request does not have. Nothing has changed.
            OutOfBlocksError: the new tokens do not fit. Earlier rows keep the blocks they got.
        """
        counts = self.count_new_tokens(width)
        if num_rows != len(self.requests) or max(counts) != width:
            raise InvalidArgumentError(
                f"the input has {num_rows} rows of {width} tokens, the cache rows with {counts} new tokens. "
                "With generate() each row is a request: num_return_sequences needs one request per sequence, "
                "and beam search needs PagedCache(..., num_beams=...)"
            )
        ends = self._list_ends(counts)
        for request, count, end in zip(self.requests, counts, ends, strict=True):
            if count > 1 and end > request.num_tokens:
                raise InvalidArgumentError(
                    f"the input has {count} tokens after the {request.num_computed_tokens} computed ones of "
                    f"request {request.request_id!r}, which has {request.num_tokens} tokens. Are computed "
                    "tokens fed again? generate(use_cache=False) and assisted decoding do so"
                )
        for request, count in zip(self.requests, counts, strict=True):
            if not self.sequences.reserve(request, count):
                pool = self.sequences.manager.block_pool
                raise OutOfBlocksError(
                    f"request {request.request_id!r} needs blocks for {count} more tokens, and "
                    f"{pool.get_num_free_blocks()} blocks are free. Free a request, and admit it again later"
                )
        self.sequences.begin_step()
        self._counts, self._ends = counts, ends
        rows = [
            self.sequences.get_slots(request, 0, end)
            for request, end in zip(self.requests, ends, strict=True)
        ]
        # Beams of a prompt are one request until they diverge: only the first one writes.
        self._writers = [
            row for row, request in enumerate(self.requests) if request not in self.requests[:row]
        ]
        self._new_slots = np.concatenate([rows[row][len(rows[row]) - counts[row] :] for row in self._writers])
        self._context_slots = pad_rows(rows)
        self._tables = pad_rows(
            [
                np.asarray(self.sequences.manager.get_block_ids(request.request_id), np.int64)
                for request in self.requests
            ]
        )

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store K and V of the new tokens, (num_rows, num_kv_heads, width, head_size), without padding."""
        key, value = (self._flatten(states, self._writers) for states in (key, value))
        self.sequences.storage.write(layer, self._new_slots, key, value)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of K and V of all rows, gathered: (num_rows, num_kv_heads, longest, head_size).

        Short rows are padded with their own first token, which a mask must hide.
        """
        num_rows, longest = self._context_slots.shape
        key, value = (
            found.unflatten(0, (num_rows, longest)).transpose(1, 2)
            for found in self.sequences.storage.read(layer, self._context_slots.reshape(-1))
        )
        return key, value

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Compute attention over the blocks.

        Args:
            query: (num_rows, num_heads, width, head_size).
        Returns:
            (num_rows, width, num_heads, head_size); zeros for padding.
        """
        storage = self.sequences.storage
        flat = self._flatten(query, range(len(self.requests)))
        if isinstance(storage, ShardedStorage):
            shards, parts = storage.shards, storage.split_heads(flat)
        else:
            shards, parts = [storage], [flat]
        starts = np.cumsum([0, *self._counts])
        # Queue the work of all shards before fetching the first result.
        found = [
            paged_attention(part, *shard.get_caches(layer), self._tables, self._ends, starts, scale=scale)
            for shard, part in zip(shards, parts, strict=True)
        ]
        attended = torch.cat([part.to(query.device) for part in found], 1)
        output = query.new_zeros(query.transpose(1, 2).shape)
        for row, some in zip(output, attended.split(self._counts), strict=True):
            row[: len(some)] = some
        return output

    def end(self) -> None:
        """Mark the new tokens as computed. Called after all layers are written."""
        for request, end in zip(self.requests, self._ends, strict=True):
            self.sequences.note_computed(request, end)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue row i from row `beam_idx[i]`, in the same blocks.

        Rows share blocks; the first row that writes to a shared block gets a copy of it. This call copies no
        K and V. Rows from which no row continues lose their blocks.

        Args:
            beam_idx: one entry per row, each a beam of the same request.
        Raises:
            InvalidArgumentError: the cache has no `num_beams`, or a row is of another request. Nothing has
                changed.
        """
        if self.num_beams == 1:
            raise InvalidArgumentError(
                "beam search replaces rows by others: use PagedCache(..., num_beams=...) with the num_beams "
                "of generate(). To continue a request in two ways, "
                "use PagedSequences.fork()"
            )
        rows = beam_idx.tolist()
        if [row // self.num_beams for row in rows] != [
            row // self.num_beams for row in range(len(self.requests))
        ]:
            raise InvalidArgumentError(f"rows {rows} mix the beams of {len(self._beams)} requests")
        sources = [self.requests[row] for row in rows]
        manager = self.sequences.manager
        for request in dict.fromkeys(self.requests):
            if request not in sources:
                manager.free(request)
        placed: list[Request] = []
        for row, source in enumerate(sources):
            request = source
            if source in placed:
                beams = self._beams[row // self.num_beams]
                request = next(beam for beam in beams if beam not in sources and beam not in placed)
                request.num_computed_tokens = source.num_computed_tokens
                manager.fork(source, request)
            placed.append(request)
        self.requests = placed

    def free(self) -> None:
        """Release the blocks of all rows, including beams. The requests can be admitted again."""
        for request in dict.fromkeys(self.requests):
            self.sequences.free(request)

    def _list_ends(self, counts: Sequence[int]) -> list[int]:
        """Return the number of tokens of each row after these new ones."""
        return [
            request.num_computed_tokens + count for request, count in zip(self.requests, counts, strict=True)
        ]

    def _flatten(self, states: torch.Tensor, rows: Iterable[int]) -> torch.Tensor:
        """Reshape (num_rows, heads, width, head_size) to (new tokens of these rows, heads, head_size)."""
        states = states.transpose(1, 2)
        return torch.cat([states[row, : self._counts[row]] for row in rows])


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
    return paged_cache.attend(module.layer_idx, query, scaling), None


AttentionInterface.register(ATTENTION_NAME, attend_over_blocks)
