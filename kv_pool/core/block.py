"""`KVCacheBlock`: the metadata about one block of KV slots. `COMPILED`: whether the core runs compiled."""

from types import FunctionType
from typing import Any, Final, cast
from weakref import ref

from mypy_extensions import i32, mypyc_attr

from kv_pool.errors import InvalidBlockError
from kv_pool.ids import BlockHashWithGroupId, BlockId

SENTINEL_ID: Final = cast(BlockId, -1)
"""The `block_id` of the sentinels and markers of the free queue."""


# A compiled block has no cyclic-GC header (`acyclic`), so a million blocks add nothing to a collection.
# In return, a reference cycle through blocks is never collected. Cycles are possible in two places: the
# free links, which `FreeKVCacheBlockQueue.__del__` clears, and the reference to the pool, which is weak.
@mypyc_attr(acyclic=True)
class KVCacheBlock:
    """The metadata of one block of `block_size` KV token slots. The bytes are in the engine's tensors.

    Attributes:
        block_id: index into the KV tensors and into `BlockPool.blocks`; -1 for queue sentinels.
        ref_cnt: number of references to the block; 0 exactly while the block is in the free queue.
        block_hash: key under which the block is found by prefix; None if it is not cached.
        block_hash_num_tokens: tokens from the start of the sequence that the hash covers.
        generation: advances when the block is reused, and when `evict_blocks` invalidates its content. While
            the number is unchanged, so is the content.
        prev_free_block, next_free_block: neighbours in the free queue; None if not linked.
        is_null: True for the pool's block 0, which stands for "no KV here" in a block table.
        pool: the pool that made the block; None for a bare block, or after its pool was deleted.
        key, num_key_tokens: plain attributes behind `block_hash` and `block_hash_num_tokens` (-1 for None; at
            most -2 if the block has no key and its own hash is noted in `parent`, see `note_own_hash`).
        owner: a weak reference to `pool`, one object for all of its blocks, or None.
        retention_id: the number under which a retention knows the block; 0 for none.
        run_id: the number of the run of a cache policy that lists the block; 0 for none.
        parent: of a cached block, the key of the block before it in its sequence; b"" for the first one, None
            if unknown. Of a block that was left out of the cache, or evicted by `evict_blocks`, its own hash:
            see `find_own_hash`. Read when content turns out to be bad.

    Blocks compare by identity, are hashable, and cannot be weakly referenced.

    States (`linked` = in the free queue):

        state         ref_cnt  linked  hash   left by
        clean         0        yes     no     get_new_blocks, touch
        cached-free   0        yes     yes    get_new_blocks (hash dropped), touch, evict_blocks
        owned         >= 1     no      no     cache_full_blocks, free_blocks
        owned-cached  >= 1     no      yes    free_blocks, evict_blocks
        null          any      no      no     never

    Contract: vLLM 0.33 `KVCacheBlock`.
    """

    __slots__ = (
        "_next_cached_id",
        "block_id",
        "generation",
        "is_null",
        "key",
        "next_free_block",
        "num_key_tokens",
        "owner",
        "parent",
        "prev_free_block",
        "ref_cnt",
        "retention_id",
        "run_id",
    )

    def __init__(
        self,
        block_id: BlockId,
        ref_cnt: int = 0,
        _block_hash: Any = None,
        _block_hash_num_tokens: int | None = None,
        prev_free_block: "KVCacheBlock | None" = None,
        next_free_block: "KVCacheBlock | None" = None,
        is_null: bool = False,
        *,
        pool: Any = None,
    ) -> None:
        # In this order the compiled fields leave no gaps, and a block takes 104 bytes, allocated as 112.
        self.ref_cnt: i32 = ref_cnt
        self.generation: i32 = 0
        # The key as bytes; declared Any, because vLLM's callers also set other types.
        self.key: Any = _block_hash
        # -1 for unknown: a native integer, so that caching a block allocates no int object.
        self.num_key_tokens: i32 = -1 if _block_hash_num_tokens is None else _block_hash_num_tokens
        # Written by the pool only. 0 or more if the prefix map's entry for the primary key is this block,
        # bare; the number is then the id of the block that was cached after this one in its sequence (0 for
        # none): a guess that saves a map lookup, and is checked before it is used. Otherwise -1.
        self._next_cached_id: i32 = -1
        self.prev_free_block: KVCacheBlock | None = prev_free_block
        self.next_free_block: KVCacheBlock | None = next_free_block
        self.is_null: bool = is_null
        # Written by a retention: its handle for the block, 0 for none. Giving the block a new hash makes the
        # number negative: the retention's record is then about content that the block no longer holds.
        self.retention_id: i32 = 0
        # The same for the cache policy of a pool: see `RunTable`.
        self.run_id: i32 = 0
        self.block_id: BlockId = block_id
        # A weak reference (one object shared by all blocks of a pool, so `is` compares owners), or None.
        self.owner: Any = None if pool is None else ref(pool)
        self.parent: Any = None

    @property
    def block_hash(self) -> Any:
        return self.key  # bytes or None; Any, so that compiled code accepts other types set by an engine

    @property
    def _block_hash(self) -> Any:
        return self.key  # vLLM's name of the field

    @_block_hash.setter
    def _block_hash(self, key: Any) -> None:
        self.key = key
        self.parent = None

    @property
    def block_hash_num_tokens(self) -> int | None:
        return None if self.num_key_tokens < 0 else self.num_key_tokens

    @property
    def _block_hash_num_tokens(self) -> int | None:
        return None if self.num_key_tokens < 0 else self.num_key_tokens

    @_block_hash_num_tokens.setter
    def _block_hash_num_tokens(self, num_tokens: int | None) -> None:
        self.num_key_tokens = -1 if num_tokens is None else num_tokens

    @property
    def pool(self) -> Any:
        owner = self.owner
        return None if owner is None else owner()

    def set_block_hash(self, block_hash: BlockHashWithGroupId, num_tokens: int | None = None) -> None:
        """Set the hash of a block that has none.

        Raises:
            InvalidBlockError: the block already carries a hash or a token count. Nothing has changed.
        """
        if self.key is not None or self.num_key_tokens >= 0:
            raise InvalidBlockError(
                f"block {self.block_id} already carries a hash; call reset_hash() or evict it first"
            )
        self.key = block_hash
        self.num_key_tokens = -1 if num_tokens is None else num_tokens
        self.parent = None
        self._next_cached_id = -1
        if self.retention_id > 0:
            self.retention_id = -self.retention_id
        if self.run_id > 0:
            self.run_id = -self.run_id

    def reset_hash(self) -> None:
        """Clear hash and token count, but not the prefix map's entry. `BlockPool` clears both together."""
        self.key = None
        self.num_key_tokens = -1
        self._next_cached_id = -1

    def __repr__(self) -> str:
        before = self.prev_free_block
        after = self.next_free_block
        return (
            f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, "
            f"_block_hash={self.key!r}, "
            f"_block_hash_num_tokens={self._block_hash_num_tokens}, "
            f"prev_free_block={None if before is None else before.block_id}, "
            f"next_free_block={None if after is None else after.block_id})"
        )


def list_ids(blocks: list[KVCacheBlock]) -> list[BlockId]:
    """Return the ids of blocks."""
    return [block.block_id for block in blocks]


COMPILED: bool = type(list_ids) is not FunctionType
"""True when the core runs compiled by mypyc, False when it runs as plain Python."""
