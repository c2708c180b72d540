"""`GroupKeys`: the keys of a KV cache group's blocks, and the blocks that a hit needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from kv_pool.core.block_keys import group_suffix
from kv_pool.ids import BlockHash, BlockHashWithGroupId, GroupId


@dataclass(frozen=True)
class GroupKeys:
    """A KV cache group of the engine, for `TierPrefixes`.

    Attributes:
        group_id: its index in the engine's configuration.
        block_size: tokens per block.
        stride: number of the request's hashes per block; a block has the last one.
        window: the next token attends to the last `window - 1` tokens; None for all.
        chunk: the next token attends to its chunk of this number of tokens; None for all.
    """

    group_id: GroupId
    block_size: int
    stride: int = 1
    window: int | None = None
    chunk: int | None = None

    @property
    def is_cacheable(self) -> bool:
        return True

    @property
    def is_downward_closed(self) -> bool:
        """Whether a hit needs all blocks before its end."""
        return self.window is None and self.chunk is None

    def count_skipped_tokens(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens the next token does not attend to."""
        if self.window is not None:
            return max(0, num_tokens - self.window + 1)
        if self.chunk is not None:
            return num_tokens - num_tokens % self.chunk
        return 0

    def count_blocks(self, request: Any, num_tokens: int) -> int:
        """Return the number of full blocks of the first `num_tokens` tokens that have a hash."""
        return min(num_tokens // self.block_size, len(request.block_hashes) // self.stride)

    def list_keys(self, request: Any, start: int, end: int) -> list[BlockHashWithGroupId]:
        """Return the keys of blocks [start, end) of a request. All of them must have a hash."""
        hashes: Sequence[BlockHash] = request.block_hashes
        stride, suffix = self.stride, group_suffix(self.group_id)
        chosen = (
            hashes[start:end] if stride == 1 else hashes[(start + 1) * stride - 1 : end * stride : stride]
        )
        return cast("list[BlockHashWithGroupId]", [block_hash + suffix for block_hash in chosen])
