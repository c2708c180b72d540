"""The block pool: which block ids a request gets, and which blocks hold which prefix. No tensors."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_pool.core.block import KVCacheBlock
    from kv_pool.core.block_hash import BlockHasher
    from kv_pool.core.block_pool import BlockPool
    from kv_pool.core.cached_keys import CachedKey
    from kv_pool.core.eviction_order import BandPolicy
    from kv_pool.core.free_queue import FreeKVCacheBlockQueue
    from kv_pool.core.hash_map import BlockHashToBlockMap
    from kv_pool.core.holds import Hold, HoldReport, HoldState
    from kv_pool.core.kv_events import (
        MEDIUM_GPU,
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVCacheEvent,
        KVEventTypes,
    )
    from kv_pool.core.mode import COMPILED
    from kv_pool.core.observer import BlockObserver
    from kv_pool.errors import (
        CorruptedPoolError,
        GroupIdError,
        InvalidArgumentError,
        InvalidBlockError,
        InvalidTypeError,
        KVPoolError,
        OutOfBlocksError,
        PoolTooLargeError,
    )
    from kv_pool.ids import BlockHash, BlockHashWithGroupId
else:
    from kv_pool.lazy_names import export_lazily

    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "kv_pool.core.block": ("KVCacheBlock",),
            "kv_pool.core.block_hash": ("BlockHasher",),
            "kv_pool.core.block_pool": ("BlockPool",),
            "kv_pool.core.cached_keys": ("CachedKey",),
            "kv_pool.core.eviction_order": ("BandPolicy",),
            "kv_pool.core.free_queue": ("FreeKVCacheBlockQueue",),
            "kv_pool.core.hash_map": ("BlockHashToBlockMap",),
            "kv_pool.core.holds": (
                "Hold",
                "HoldReport",
                "HoldState",
            ),
            "kv_pool.core.kv_events": (
                "KVCacheEvent",
                "BlockStored",
                "BlockRemoved",
                "AllBlocksCleared",
                "KVEventTypes",
                "MEDIUM_GPU",
            ),
            "kv_pool.core.mode": ("COMPILED",),
            "kv_pool.core.observer": ("BlockObserver",),
            "kv_pool.errors": (
                "InvalidArgumentError",
                "InvalidBlockError",
                "InvalidTypeError",
                "OutOfBlocksError",
                "PoolTooLargeError",
                "GroupIdError",
                "CorruptedPoolError",
                "KVPoolError",
            ),
            "kv_pool.ids": (
                "BlockHash",
                "BlockHashWithGroupId",
            ),
        },
    )

__all__ = [
    "BlockPool",
    "KVCacheBlock",
    "BlockHasher",
    "BlockHash",
    "BlockHashWithGroupId",
    "FreeKVCacheBlockQueue",
    "BlockHashToBlockMap",
    "KVCacheEvent",
    "BlockStored",
    "BlockRemoved",
    "AllBlocksCleared",
    "KVEventTypes",
    "MEDIUM_GPU",
    "CachedKey",
    "Hold",
    "HoldReport",
    "HoldState",
    "BandPolicy",
    "BlockObserver",
    "COMPILED",
    "InvalidArgumentError",
    "InvalidBlockError",
    "InvalidTypeError",
    "OutOfBlocksError",
    "PoolTooLargeError",
    "GroupIdError",
    "CorruptedPoolError",
    "KVPoolError",
]
