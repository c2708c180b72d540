"""`PagedBatch`: requests that go through a model together, one row each, and their slots meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch

from kv_pool.errors import InvalidArgumentError, OutOfBlocksError
from kv_pool.integrations.attention.paged_attention import paged_attention
from kv_pool.integrations.transformers.sequences import PagedSequences, pad_rows
from kv_pool.manager.requests.request import Request
from kv_pool.storage.sharded_storage import ShardedStorage


class PagedBatch:
    """The rows of a model's input, and where the K and V of their tokens are.

        row 0   |  computed  |  new  |            a prompt with a cached prefix
        row 1   |       computed       |1|pad|    a sequence that decodes, padded to the width of the input

    Args:
        sequences: where the rows have their blocks.
        requests: one a row, admitted.
        num_new_tokens: new tokens of each row, where they differ or rows have different lengths; by default
            the whole width of the input in every row.
        num_beams: rows of each request, for beam search. Until the first `reorder` they are the request's
            prompt, computed once for each beam and stored once.
    Raises:
        InvalidArgumentError: no rows, a row without new tokens, rows of different lengths without
            `num_new_tokens`, or beams with it.
    """

    def __init__(
        self,
        sequences: PagedSequences,
        requests: Sequence[Request],
        num_new_tokens: Sequence[int] | None = None,
        num_beams: int = 1,
    ) -> None:
        lengths = [request.num_computed_tokens for request in requests]
        if not lengths or (num_new_tokens is None and len(set(lengths)) > 1):
            raise InvalidArgumentError(
                f"rows have {lengths} computed tokens; a batch has rows, and where their lengths differ "
                "num_new_tokens has to say how many tokens of the input are whose"
            )
        if num_new_tokens is not None and (len(num_new_tokens) != len(lengths) or min(num_new_tokens) < 1):
            raise InvalidArgumentError(f"{len(lengths)} rows with {list(num_new_tokens)} new tokens")
        if num_beams < 1 or (num_beams > 1 and num_new_tokens is not None):
            raise InvalidArgumentError(
                f"{num_beams} beams; there is at least one, and several have no num_new_tokens"
            )
        self.sequences = sequences
        self.num_beams = num_beams
        self._beams: list[list[Request]] = [
            [request, *(cast(Request, Beam(request, number)) for number in range(1, num_beams))]
            for request in requests
        ]
        self.requests = [request for request in requests for _ in range(num_beams)]
        self.num_new_tokens = None if num_new_tokens is None else list(num_new_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens that the longest row has K and V of."""
        return max(request.num_computed_tokens for request in self.requests)

    def count_new_tokens(self, width: int) -> list[int]:
        """New tokens of each row of an input `width` tokens wide."""
        if self.num_new_tokens is None:
            return [width] * len(self.requests)
        return self.num_new_tokens

    def count_context(self, width: int) -> int:
        """Tokens of the longest row after an input `width` tokens wide."""
        return max(
            request.num_computed_tokens + count
            for request, count in zip(self.requests, self.count_new_tokens(width), strict=True)
        )

    def begin(self, num_rows: int, width: int) -> None:
        """Reserve and look up the slots of a run of the model: before its first layer.

        Raises:
            InvalidArgumentError: an input of another shape than the rows say, or several tokens of a row
                that its request does not have. Nothing has changed.
            OutOfBlocksError: the new tokens do not fit. Rows before may have got blocks, which they keep.
        """
        counts = self.count_new_tokens(width)
        if num_rows != len(self.requests) or max(counts) != width:
            raise InvalidArgumentError(
                f"an input of {num_rows} rows of {width} tokens for rows with {counts} new tokens. With "
                "generate() each row is a request: num_return_sequences takes one for each, "
                "and beam search PagedCache(..., num_beams=...)"
            )
        for request, count in zip(self.requests, counts, strict=True):
            if count > 1 and request.num_computed_tokens + count > request.num_tokens:
                raise InvalidArgumentError(
                    f"an input of {count} tokens after the {request.num_computed_tokens} computed ones of "
                    f"request {request.request_id!r}, which has {request.num_tokens}. Are computed ones fed "
                    "again? generate(use_cache=False) and assisted decoding do so"
                )
        for request, count in zip(self.requests, counts, strict=True):
            if not self.sequences.reserve(request, count):
                pool = self.sequences.manager.block_pool
                raise OutOfBlocksError(
                    f"request {request.request_id!r} needs room for {count} more tokens, and "
                    f"{pool.get_num_free_blocks()} blocks are free. Free a request, and admit it again later"
                )
        self.sequences.begin_step()
        self._counts = counts
        self._ends = [
            request.num_computed_tokens + count for request, count in zip(self.requests, counts, strict=True)
        ]
        rows = [
            self.sequences.get_slots(request, 0, end)
            for request, end in zip(self.requests, self._ends, strict=True)
        ]
        # Beams of a prompt are one request until they part: the first one writes.
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
        """Store K and V of the new tokens: (num_rows, num_kv_heads, width, head_size), padding left out."""
        key, value = (self._flatten(states, self._writers) for states in (key, value))
        self.sequences.storage.write(layer, self._new_slots, key, value)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all rows, gathered: (num_rows, num_kv_heads, longest, head_size), copies.

        Short rows are filled up with their own first token; a mask has to hide it.
        """
        num_rows, longest = self._context_slots.shape
        key, value = (
            found.unflatten(0, (num_rows, longest)).transpose(1, 2)
            for found in self.sequences.storage.read(layer, self._context_slots.reshape(-1))
        )
        return key, value

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention over the blocks: (num_rows, num_heads, width, head_size) to (num_rows, width, ...).

        What comes back for padding is zeros.
        """
        storage = self.sequences.storage
        flat = self._flatten(query, range(len(self.requests)))
        if isinstance(storage, ShardedStorage):
            shards, parts = storage.shards, storage.split_heads(flat)
        else:
            shards, parts = [storage], [flat]
        starts = np.cumsum([0, *self._counts])
        # All shards' work is queued before the first result is fetched.
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
        """All layers have been written: the tokens are computed."""
        for request, end in zip(self.requests, self._ends, strict=True):
            self.sequences.note_computed(request, end)

    def reorder(self, rows: Sequence[int]) -> None:
        """Let row i go on from where row `rows[i]` is, in the same blocks.

        Rows share blocks; the first that writes to a shared block gets a copy of it. No K and V are copied
        here. Rows that no other goes on from lose their blocks.

        Args:
            rows: one a row, each a beam of the same request.
        Raises:
            InvalidArgumentError: made without `num_beams`, or a row of another request. Nothing has changed.
        """
        if self.num_beams == 1:
            raise InvalidArgumentError(
                "beam search puts rows in the place of others: PagedCache(..., num_beams=...) as many as "
                "generate() is called with. To let a request go on in two ways, "
                "PagedSequences.fork() it"
            )
        if [row // self.num_beams for row in rows] != [
            row // self.num_beams for row in range(len(self.requests))
        ]:
            raise InvalidArgumentError(f"rows {list(rows)} mix the beams of {len(self._beams)} requests")
        sources = [self.requests[row] for row in rows]
        manager = self.sequences.manager
        for request in list_distinct(self.requests):
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
        """Release the blocks of all rows. The requests may be admitted again."""
        for request in list_distinct(self.requests):
            self.sequences.free(request)

    def _flatten(self, states: torch.Tensor, rows: Iterable[int]) -> torch.Tensor:
        """(num_rows, heads, width, head_size) to (new tokens of these rows, heads, head_size)."""
        states = states.transpose(1, 2)
        return torch.cat([states[row, : self._counts[row]] for row in rows])


class Beam:
    """A row of beam search beside the request's own: the request's prompt, and blocks under another id."""

    def __init__(self, request: Request, number: int) -> None:
        self.request_id = f"{request.request_id}, beam {number}"
        self.num_computed_tokens = 0
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def list_distinct(requests: Sequence[Request]) -> list[Request]:
    """Each request once, in order."""
    return list({id(request): request for request in requests}.values())
