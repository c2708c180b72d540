"""`ShardedStorage`: K and V of one id space on several devices, each with some of the heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kv_pool.errors import InvalidArgumentError
from kv_pool.storage.kv_storage import KVStorage
from kv_pool.storage.move_plan import Moves


class ShardedStorage:
    """Tensor parallelism: one block table for all shards, and block i of the pool is block i of each.

        shard 0   cuda:0   KV heads 0 to 3    |  block 0  |  block 1  |  block 2  | ...
        shard 1   cuda:1   KV heads 4 to 7    |  block 0  |  block 1  |  block 2  | ...

    Args:
        shards: torch storages, one a device, in the order of the heads that they hold.
    Raises:
        InvalidArgumentError: no shards, a latent cache, or shards that differ in blocks, block size, layers,
            head size or dtype.

    Attributes:
        shards: as given; each shard's attention reads its `get_caches`.
        num_blocks, block_size, num_layers, head_size, dtype: of every shard; num_kv_heads: of all together.
        device: of the first shard; `read` gives its results there.
    """

    def __init__(self, shards: Sequence[KVStorage]) -> None:
        kinds = {
            (shard.num_blocks, shard.block_size, shard.num_layers, shard.head_size, shard.dtype)
            for shard in shards
        }
        if len(kinds) != 1 or not all(shard.has_values for shard in shards):
            raise InvalidArgumentError(
                "shards have K and V, and one (num_blocks, block_size, num_layers, head_size, dtype), not "
                f"{sorted(kinds)}"
            )
        self.shards = list(shards)
        [(self.num_blocks, self.block_size, self.num_layers, self.head_size, self.dtype)] = kinds
        self.num_kv_heads = sum(shard.num_kv_heads for shard in shards)
        self.device = shards[0].device

    @property
    def has_values(self) -> bool:
        return True

    @property
    def tensors(self) -> list[Any]:
        """Those of all shards, one shard after the other."""
        return [tensor for shard in self.shards for tensor in shard.tensors]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all shards."""
        return sum(shard.block_bytes for shard in self.shards)

    @property
    def scratch_ids(self) -> range:
        """The scratch blocks that every shard has: see `BlockStorage.scratch_ids`."""
        return min((shard.scratch_ids for shard in self.shards), key=len)

    def write(self, layer: int, slots: Any, key: Any, value: Any) -> None:
        """Store K and V of tokens, all heads, on any device: see `KVStorage.write`.

        Raises:
            InvalidArgumentError, InvalidBlockError, InvalidTypeError: nothing was written.
        """
        shape = (len(slots), self.num_kv_heads, self.head_size)
        if tuple(key.shape) != shape or tuple(value.shape) != shape:
            raise InvalidArgumentError(
                f"key and value have shapes {tuple(key.shape)} and {tuple(value.shape)}, {len(slots)} slots "
                f"take {shape}"
            )
        for shard, *parts in zip(self.shards, self.split_heads(key), self.split_heads(value), strict=True):
            shard.write(layer, slots, *parts)

    def read(self, layer: int, slots: Any) -> tuple[Any, Any]:
        """K and V of tokens, all heads, copied to `device`: see `KVStorage.read`."""
        import torch

        found = [shard.read(layer, slots) for shard in self.shards]
        key, value = (
            torch.cat([part.to(self.device) for part in parts], 1) for parts in zip(*found, strict=True)
        )
        return key, value

    def split_heads(self, states: Any) -> list[Any]:
        """Parts of (num_tokens, heads, head_size), one a shard on its device; heads of K, V or queries.

        Raises:
            InvalidArgumentError: a number of heads that is no multiple of `num_kv_heads`.
        """
        group, rest = divmod(states.shape[1], self.num_kv_heads)
        if rest:
            raise InvalidArgumentError(
                f"{states.shape[1]} heads are no multiple of {self.num_kv_heads} KV heads"
            )
        parts = states.split([shard.num_kv_heads * group for shard in self.shards], 1)
        return [part.to(shard.device) for part, shard in zip(parts, self.shards, strict=True)]

    def apply_moves(self, moves: Moves) -> None:
        """Copy whole blocks inside each shard: see `BlockStorage.apply_moves`.

        Raises:
            CopyFailedError: broke off in one of the shards. Every source still holds its bytes in all of
                them; the targets may hold anything.
        """
        for shard in self.shards:
            shard.apply_moves(moves)

    def copy_to(self, other: ShardedStorage, moves: Moves) -> None:
        """Copy whole blocks to another storage with as many shards: see `BlockStorage.copy_to`."""
        if len(self.shards) != len(other.shards):
            raise InvalidArgumentError(
                f"this storage has {len(self.shards)} shards, the other {len(other.shards)}"
            )
        for shard, target in zip(self.shards, other.shards, strict=True):
            shard.copy_to(target, moves)
