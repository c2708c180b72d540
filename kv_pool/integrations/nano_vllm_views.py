"""Live, read-only views of a `BlockManager`'s blocks, under the names of nano-vllm's attributes.

Ids are the engine's: block n is `block_pool.blocks[n + 1]`, since block 0 of the pool is its null block.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import MethodType
from typing import Any, Protocol

from kv_pool.core.arguments import as_int, as_list
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_hash import BlockHasher
from kv_pool.core.block_keys import get_block_hash
from kv_pool.core.block_pool import BlockPool
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHash, BlockId, GroupId

NO_HASH = -1
"""The hash of a block that is not cached, and the `prefix` of a sequence's first block."""


class Block:
    """A live view of one block.

    Attributes:
        block_id: the engine's id.
    """

    __slots__ = ("_block", "_token_ids", "block_id")

    def __init__(self, block: KVCacheBlock, token_ids: Sequence[int]) -> None:
        self.block_id = BlockId(block.block_id - 1)
        self._block = block
        self._token_ids = token_ids

    def __repr__(self) -> str:
        return f"Block(block_id={self.block_id}, ref_count={self.ref_count}, hash={self.hash})"

    @property
    def ref_count(self) -> int:
        """Number of sequences that hold the block; 0 for a free one."""
        return self._block.ref_cnt

    @property
    def hash(self) -> int:
        """The hash under which the block is cached, as from `compute_hash`; -1 while it is not cached."""
        key = self._block.block_hash
        return NO_HASH if key is None else int.from_bytes(get_block_hash(key), "big")

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the block, as many as the block size; [] while it is not cached."""
        return [] if self._block.block_hash is None else list(self._token_ids)


class Blocks(Sequence[Block]):
    """All blocks of the engine by id. `len` and indexing are O(1)."""

    def __init__(self, block_pool: BlockPool, token_ids: Sequence[Sequence[int]]) -> None:
        self._block_pool = block_pool
        self._token_ids = token_ids

    def __len__(self) -> int:
        return self._block_pool.num_gpu_blocks - 1

    def __getitem__(self, block_id: Any) -> Any:
        if isinstance(block_id, slice):
            return [self[each] for each in range(*block_id.indices(len(self)))]
        number = range(1, len(self) + 1)[block_id]
        return Block(self._block_pool.blocks[number], self._token_ids[number])


class FreeBlockIds(Sequence[BlockId]):
    """The ids of the free blocks, next to be reused first. `len` and `in` are O(1); `[i]` is O(i)."""

    def __init__(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool

    def __len__(self) -> int:
        return self._block_pool.get_num_free_blocks()

    def __iter__(self) -> Iterator[BlockId]:
        for block in self._block_pool.free_block_queue.iter_blocks_after(None):
            yield BlockId(block.block_id - 1)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        index = range(len(self))[index]
        for position, block_id in enumerate(self):
            if position == index:
                return block_id
        raise IndexError(f"{index} of {len(self)} free blocks")

    def __contains__(self, block_id: object) -> bool:
        return is_free(self._block_pool, block_id) is True


class UsedBlockIds(Set[BlockId]):
    """The ids of the blocks that sequences hold, lowest first. `len` and `in` are O(1), a walk O(blocks)."""

    def __init__(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool

    @classmethod
    def _from_iterable(cls, it: Any) -> Any:
        return set(it)

    def __len__(self) -> int:
        return self._block_pool.num_gpu_blocks - 1 - self._block_pool.get_num_free_blocks()

    def __iter__(self) -> Iterator[BlockId]:
        return (
            BlockId(block.block_id - 1)
            for block in self._block_pool.blocks
            if block.ref_cnt and not block.is_null
        )

    def __contains__(self, block_id: object) -> bool:
        return is_free(self._block_pool, block_id) is False


class HashToBlockId(Mapping[int, BlockId]):
    """A mapping from the hash of each cached prefix to the id of its last block. O(1), except iteration.

    Every entry can be hit: the hash of a reused block is removed.
    """

    def __init__(self, block_pool: BlockPool, digest_size: int) -> None:
        self._block_pool = block_pool
        self._digest_size = digest_size

    def __len__(self) -> int:
        return len(self._block_pool.cached_block_hash_to_block)

    def __iter__(self) -> Iterator[int]:
        for key in self._block_pool.cached_block_hash_to_block.entries:
            yield int.from_bytes(get_block_hash(key), "big")

    def __getitem__(self, block_hash: int) -> BlockId:
        if not isinstance(block_hash, int) or not 0 <= block_hash < 256**self._digest_size:
            raise KeyError(block_hash)
        found = self._block_pool.get_cached_block(
            BlockHash(block_hash.to_bytes(self._digest_size, "big")), [GroupId(0)]
        )
        if found is None:
            raise KeyError(block_hash)
        return BlockId(found[0].block_id - 1)


class _HasHasher(Protocol):
    hasher: BlockHasher


class ComputeHash:
    """`BlockManager.compute_hash`: uses the manager's hasher, or a `BlockHasher()` if called on the class."""

    def __get__(self, manager: _HasHasher | None, owner: type) -> Callable[..., int]:
        return MethodType(compute_hash, owner if manager is None else manager.hasher)


def compute_hash(hasher: BlockHasher | type, token_ids: Sequence[int], prefix: int = NO_HASH) -> int:
    """Return the hash under which a full block of these tokens is cached.

        >>> from kv_pool.integrations.nano_vllm import BlockManager
        >>> manager = BlockManager(num_blocks=8, block_size=2)
        >>> head = manager.compute_hash([1, 2])
        >>> manager.compute_hash([3, 4], head) == BlockManager.compute_hash([3, 4], head)
        True
        >>> manager.hash_to_block_id.get(head, -1)
        -1

    The number differs from nano-vllm's, and between processes: 128 bits with a secret seed by default, or the
    result of the manager's `hasher`. Called on the class, it uses the default hasher.

    Args:
        token_ids: the tokens of one full block.
        prefix: the hash of the previous block; -1 for the first block of a sequence.
    Raises:
        InvalidArgumentError: the tokens are not a full block, or `prefix` is not a hash.
    Cost: O(tokens).
    """
    tokens = as_list("token_ids", token_ids)
    prefix = as_int("prefix", prefix)
    if isinstance(hasher, type):
        hasher = BlockHasher(block_size=max(1, len(tokens)))
    if len(tokens) != hasher.block_size or not tokens:
        raise InvalidArgumentError(
            f"token_ids has {len(tokens)} tokens; only full blocks of {hasher.block_size} tokens are hashed"
        )
    if not NO_HASH <= prefix < 256**hasher.digest_size:
        raise InvalidArgumentError(
            f"prefix is {prefix}; it is a hash of {hasher.digest_size} bytes, 0 or more, or -1 for none"
        )
    parent = None if prefix == NO_HASH else BlockHash(prefix.to_bytes(hasher.digest_size, "big"))
    return int.from_bytes(hasher.hash_blocks(tokens, parent)[0], "big")


def is_free(block_pool: BlockPool, block_id: object) -> bool | None:
    """Return whether the engine's block is free; None if it has no such block."""
    if not isinstance(block_id, int) or not 0 <= block_id < block_pool.num_gpu_blocks - 1:
        return None
    return block_pool.blocks[block_id + 1].ref_cnt == 0
