"""`GPUKVPool`, the `KVPoolProtocol` over a block pool: sequences and block ids instead of block objects."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_pool.adapter.device_pools import DevicePools
    from kv_pool.adapter.gpu_kv_pool import GPUKVPool
    from kv_pool.adapter.migration_hook import MigrationHook
    from kv_pool.adapter.migration_manager import KVPoolMigrationManager, RemoteMigration
    from kv_pool.adapter.pool_sequences import PoolSequences
    from kv_pool.adapter.victims import EvictionPolicy, LRUEviction, SequenceInfo
    from kv_pool.errors import (
        EvictedSequenceError,
        FrozenSequenceError,
        PinnedBlockError,
        PoolExhaustedError,
        UnknownDeviceError,
        UnknownSequenceError,
    )
    from kv_pool.protocol import (
        AllocationResult,
        BlockAllocationRequest,
        BlockInfo,
        Eviction,
        KVPoolProtocol,
        MigrationResult,
    )
else:
    from kv_pool.lazy_names import export_lazily

    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "kv_pool.adapter.device_pools": ("DevicePools",),
            "kv_pool.adapter.gpu_kv_pool": ("GPUKVPool",),
            "kv_pool.adapter.migration_manager": (
                "KVPoolMigrationManager",
                "RemoteMigration",
            ),
            "kv_pool.adapter.migration_hook": ("MigrationHook",),
            "kv_pool.adapter.pool_sequences": ("PoolSequences",),
            "kv_pool.adapter.victims": (
                "EvictionPolicy",
                "LRUEviction",
                "SequenceInfo",
            ),
            "kv_pool.errors": (
                "PoolExhaustedError",
                "UnknownSequenceError",
                "EvictedSequenceError",
                "FrozenSequenceError",
                "PinnedBlockError",
                "UnknownDeviceError",
            ),
            "kv_pool.protocol": (
                "KVPoolProtocol",
                "BlockAllocationRequest",
                "AllocationResult",
                "BlockInfo",
                "Eviction",
                "MigrationResult",
            ),
        },
    )

__all__ = [
    "GPUKVPool",
    "KVPoolProtocol",
    "BlockAllocationRequest",
    "AllocationResult",
    "BlockInfo",
    "Eviction",
    "MigrationResult",
    "EvictionPolicy",
    "LRUEviction",
    "SequenceInfo",
    "DevicePools",
    "MigrationHook",
    "KVPoolMigrationManager",
    "RemoteMigration",
    "PoolSequences",
    "PoolExhaustedError",
    "UnknownSequenceError",
    "EvictedSequenceError",
    "FrozenSequenceError",
    "PinnedBlockError",
    "UnknownDeviceError",
]
