"""`BlockPool`: a pool of KV cache blocks with prefix caching."""

from typing import NoReturn, SupportsIndex

from kv_pool.core.arguments import refuse_copy
from kv_pool.core.block import COMPILED
from kv_pool.core.pool_core import BlockPoolCore


# Never compiled: a pool needs a `__dict__` and weak references (its blocks hold one), and users may subclass
# and patch it like any Python class. Its methods run compiled in the base class.
class BlockPool(BlockPoolCore):
    """A pool of KV cache blocks with prefix caching: it allocates, frees, caches and evicts blocks.

        >>> from kv_pool import BlockPool
        >>> pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=16)
        >>> blocks = pool.get_new_blocks(3)
        >>> [block.block_id for block in blocks], pool.get_num_free_blocks()
        ([1, 2, 3], 4)
        >>> pool.free_blocks(reversed(blocks))
        >>> pool.get_num_free_blocks()
        7

    A free block keeps its hash until it is reused: free is not empty. Blocks are reused in the order of the
    free queue: least recently freed first, a request's tail before its head.

    Args:
        num_gpu_blocks: number of blocks, block 0 included. Block 0 becomes the null block and is never
            allocated.
        enable_caching: False makes every freed block the next to be reused.
        hash_block_size: tokens per request hash; a group's block size is a multiple of it.
        enable_kv_cache_events: append an event to `kv_event_queue` for each change of the prefix map.
        metrics_collector: a `BlockObserver` to notify of every allocation, hit and eviction.
        num_hash_lookahead_tokens: tokens after its block that a hash also covers; as in the `BlockHasher`.
        medium: GPU, CPU or STORAGE, as the events report it.
        event_types: event classes to use, if the engine has its own.
        use_int_block_hashes: True: events carry the last 8 bytes of a hash as an integer. False: all its
            bytes.
        dense_events: True: each `BlockStored` carries the tokens of its own blocks only, so null or masked
            blocks split a store into several events; the blocks of one group that a call evicts share one
            `BlockRemoved`. False, as in vLLM: one store whose tokens span the whole range, and one removal
            per block.
        policy: the cache policy that chooses the blocks to evict; see `open_policy`. None: LRU.
        live_curve: estimate the hit rates at other capacities while the pool runs; see `read_live_curve` of
            `kv_pool.reports`. Takes at most 1 MB.

    Attributes:
        blocks: all blocks; a block's id is its index.
        free_block_queue: the free blocks in eviction order.
        cached_block_hash_to_block: the prefix map.
        null_block: block 0; stands for "no KV here" in a block table.
        lower_tiers: the `LowerTiers` to notify before cached blocks are reused and lose their keys, or
            None. Set it before the pool is used.
        num_evictions: number of keys that blocks have lost to reuse, eviction, a reset or a move; only
            grows.

    Not thread-safe: only the scheduler thread may call it. Pools compare by identity.
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

    # For a compiled property, mypyc 2.4 would call the setter with a null pointer and crash. With this method
    # all attributes are assigned slowly, so the plain pool, which assigns many, goes without.
    if COMPILED:

        def __delattr__(self, name: str) -> None:
            if name == "kv_event_queue":
                raise AttributeError("kv_event_queue cannot be deleted; take_events() empties it")
            super().__delattr__(name)
