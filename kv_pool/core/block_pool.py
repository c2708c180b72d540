"""`BlockPool`: hands out blocks of KV slots and remembers which of them hold which prefix."""

from typing import NoReturn, SupportsIndex

from kv_pool.core.identity import refuse_copy
from kv_pool.core.pool_core import BlockPoolCore


# Never compiled, so that a pool has a `__dict__`, can be weakly referenced (its blocks do that) and can be
# subclassed and patched like any Python class, while every method runs compiled in the base class.
class BlockPool(BlockPoolCore):
    """Hands out blocks of KV slots and remembers which of them hold which prefix.

        >>> from kv_pool import BlockPool
        >>> pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=16)
        >>> blocks = pool.get_new_blocks(3)
        >>> [block.block_id for block in blocks], pool.get_num_free_blocks()
        ([1, 2, 3], 4)
        >>> pool.free_blocks(reversed(blocks))
        >>> pool.get_num_free_blocks()
        7

    A free block keeps its hash until it is handed out again: free is not empty. Which block goes next is
    the order of the free queue: least recently freed first, a request's tail before its head.

    Args:
        num_gpu_blocks: all blocks, block 0 included, which becomes the null block and is never handed out.
        enable_caching: False makes every freed block the next to be reused.
        hash_block_size: tokens per request hash; a group's block size is a multiple of it.
        enable_kv_cache_events: append to `kv_event_queue` what happens to the prefix map.
        metrics_collector: a `BlockObserver` that is told of every hand-out, hit and eviction.
        num_hash_lookahead_tokens: tokens after its block that a hash also covers; as in the `BlockHasher`.
        medium: GPU, CPU or STORAGE; goes into the events.
        event_types: the classes of the events, where the engine has its own.
        use_int_block_hashes: events carry the last 8 bytes of a hash as an integer; False: all its bytes.
        dense_events: each `BlockStored` has the tokens of its blocks and no others: where null or masked
            blocks lie between them, there are several. Blocks of a group that one call evicts are in one
            `BlockRemoved`. False, as in vLLM: one store, whose tokens span all, and a removal for each block.

    Attributes:
        blocks: all blocks; a block's id is its index.
        free_block_queue: the free blocks in eviction order.
        cached_block_hash_to_block: the prefix map.
        null_block: block 0; stands for "no KV here" in a block table.
        colder_tiers: who is told of cached blocks that are taken anew, before they lose their keys; None for
            nobody. Set it before the pool is used.
        num_evictions: how many keys blocks have lost, to reuse, eviction, a reset or a move; only grows.

    Not thread-safe: one scheduler thread calls it. Pools compare by identity.
    Contract: vLLM 0.33 `BlockPool`.
    """

    def __repr__(self) -> str:
        num_free = self.get_num_free_blocks()
        return (
            f"<{type(self).__name__} of {self.num_gpu_blocks} blocks: {num_free} free, "
            f"{self.num_gpu_blocks - 1 - num_free} in use, "
            f"{len(self.cached_block_hash_to_block)} keys cached>"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self)

    def __delattr__(self, name: str) -> None:
        # mypyc (2.4) calls a compiled property's setter with a null pointer here, and crashes.
        if name == "kv_event_queue":
            raise AttributeError("kv_event_queue can not be deleted; take_events() empties it")
        super().__delattr__(name)
