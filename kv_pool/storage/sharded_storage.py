"""`ShardedStorage`: K and V on several devices, each with some of the heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockId
from kv_pool.storage.block_storage import Moves
from kv_pool.storage.kv_storage import KVStorage


class ShardedStorage:
    """A storage for tensor parallelism: block i of the pool is block i of every shard.

        shard 0   cuda:0   KV heads 0 to 3    |  block 0  |  block 1  |  block 2  | ...
        shard 1   cuda:1   KV heads 4 to 7    |  block 0  |  block 1  |  block 2  | ...

    Args:
        shards: torch storages, one per device, in the order of the heads that they hold.
    Raises:
        InvalidArgumentError: no shards, a latent cache, or shards that differ in blocks, block size, layers,
            head size or dtype.

    Attributes:
        shards: the shards, as given; each shard's attention uses the shard's `get_caches`.
        num_blocks, block_size, num_layers, head_size, dtype: those of each shard.
        num_kv_heads: the sum over all shards.
        device: device of the first shard, and of the results of `read`.
    """

    has_values = True

    def __init__(self, shards: Sequence[KVStorage]) -> None:
        kinds = {
            (shard.num_blocks, shard.block_size, shard.num_layers, shard.head_size, shard.dtype)
            for shard in shards
        }
        if len(kinds) != 1 or not all(shard.has_values for shard in shards):
            raise InvalidArgumentError(
                "shards need K and V, and equal (num_blocks, block_size, num_layers, head_size, dtype), not "
                f"{sorted(kinds)}"
            )
        self.shards = list(shards)
        [(self.num_blocks, self.block_size, self.num_layers, self.head_size, self.dtype)] = kinds
        self.num_kv_heads = sum(shard.num_kv_heads for shard in shards)
        self.device = shards[0].device

    @property
    def tensors(self) -> list[Any]:
        """The tensors of all shards, in shard order."""
        return [tensor for shard in self.shards for tensor in shard.tensors]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, summed over all shards."""
        return sum(shard.block_bytes for shard in self.shards)

    @property
    def scratch_ids(self) -> Sequence[BlockId]:
        """The ids of the scratch blocks that every shard has; see `BlockStorage.scratch_ids`."""
        return min((shard.scratch_ids for shard in self.shards), key=len)

    def write(self, layer: int, slots: Any, key: Any, value: Any) -> None:
        """Store K and V of tokens, all heads, from any device; see `KVStorage.write`.

        Raises:
            InvalidArgumentError, InvalidBlockError, InvalidTypeError: as there. Nothing was written.
        """
        shape = (len(slots), self.num_kv_heads, self.head_size)
        if tuple(key.shape) != shape or tuple(value.shape) != shape:
            raise InvalidArgumentError(
                f"key and value have shapes {tuple(key.shape)} and {tuple(value.shape)}; {len(slots)} slots "
                f"need {shape}"
            )
        for shard, *parts in zip(self.shards, self.split_heads(key), self.split_heads(value), strict=True):
            shard.write(layer, slots, *parts)

    def read(self, layer: int, slots: Any) -> tuple[Any, Any]:
        """Return copies of K and V of tokens, all heads, on `device`; see `KVStorage.read`."""
        import torch

        found = [shard.read(layer, slots) for shard in self.shards]
        key, value = (
            torch.cat([part.to(self.device) for part in parts], 1) for parts in zip(*found, strict=True)
        )
        return key, value

    def split_heads(self, states: Any) -> list[Any]:
        """Split (num_tokens, heads, head_size) of K, V or queries into one part per shard, on its device.

        Raises:
            InvalidArgumentError: the number of heads is not a multiple of `num_kv_heads`.
        """
        group, rest = divmod(states.shape[1], self.num_kv_heads)
        if rest:
            raise InvalidArgumentError(
                f"{states.shape[1]} heads are not a multiple of {self.num_kv_heads} KV heads"
            )
        parts = states.split([shard.num_kv_heads * group for shard in self.shards], 1)
        return [part.to(shard.device) for part, shard in zip(parts, self.shards, strict=True)]

    def apply_moves(self, moves: Moves) -> None:
        """Copy whole blocks inside each shard; see `BlockStorage.apply_moves`.

        Raises:
            CopyFailedError: the copy failed in one of the shards. Sources that are not targets are intact in
                all shards; the targets hold undefined bytes.
        """
        for shard in self.shards:
            shard.apply_moves(moves)

    def copy_to(self, other: ShardedStorage, moves: Moves) -> None:
        """Copy whole blocks to another storage with the same number of shards; see `BlockStorage.copy_to`."""
        if len(self.shards) != len(other.shards):
            raise InvalidArgumentError(
                f"this storage has {len(self.shards)} shards, the other {len(other.shards)}"
            )
        for shard, target in zip(self.shards, other.shards, strict=True):
            shard.copy_to(target, moves)
