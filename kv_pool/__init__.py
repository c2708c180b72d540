"""kv_pool: a stand-alone KV-cache block pool with prefix caching, with the behaviour of vLLM v1's.

The core decides which block ids a request gets and which blocks hold which prefix. Start with
`KVCacheManager` (block tables for a scheduler), `GPUKVPool` (blocks by id, for sequences) or `BlockPool`
(blocks); see kv_pool/README.md for the map.

More names, each imported when it is first used:

    kv_pool.core            the block pool, hashes, events, holds
    kv_pool.manager         block tables for a scheduler: groups, forks, swap, retention, leases
    kv_pool.contiguous      runs of consecutive ids, compaction, Defragmenter
    kv_pool.storage         the bytes of blocks: KVStorage, on CPU and GPU
    kv_pool.adapter         GPUKVPool, DevicePools, KVPoolMigrationManager, MigrationHook
    kv_pool.tiers           host memory and disk below a pool, dumps
    kv_pool.migration       blocks that move between processes and nodes
    kv_pool.events          the event stream: publisher, subscriber, PrefixMirror
    kv_pool.replay          production traces through the pool
    kv_pool.control         a running pool from outside, as kv-pool stats sees it
    kv_pool.errors          every error

    kv_pool.reports.allocation_monitor          AllocationMonitor: a pool's counts over time
    kv_pool.integrations.attention              paged_attention: batched attention over blocks
    kv_pool.integrations.transformers           PagedCache, PagedSequences: transformers models on blocks
    kv_pool.integrations.nano_vllm              BlockManager: nano-vllm's
    kv_pool.integrations.block_space_manager    BlockSpaceManager: groups of sequences, as in vLLM 0.6
    kv_pool.integrations.sequence_allocator     KVCacheAllocator, SequencePageTable: K and V by position
    kv_pool.integrations.shared_prefix          SharedPrefixManager: samples of one prompt
    kv_pool.integrations.paged_layers           PagedAttention, PagedTransformerLayer, PagedInferenceEngine
    kv_pool.integrations.adaptive_block_size    AdaptiveBlockManager: block size by access pattern
    kv_pool.integrations.system_config          SystemConfigOptimizer: a pool's size by model and work
"""

from typing import TYPE_CHECKING

from kv_pool.core.mode import COMPILED
from kv_pool.version import __version__

if TYPE_CHECKING:
    from kv_pool.adapter.gpu_kv_pool import GPUKVPool
    from kv_pool.adapter.victims import LRUEviction
    from kv_pool.core.block import KVCacheBlock
    from kv_pool.core.block_hash import BlockHasher
    from kv_pool.core.block_pool import BlockPool
    from kv_pool.core.free_queue import FreeKVCacheBlockQueue
    from kv_pool.core.hash_map import BlockHashToBlockMap
    from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
    from kv_pool.errors import (
        ControlError,
        CopyFailedError,
        CorruptedPoolError,
        DrawingError,
        EvictedSequenceError,
        ForkedPoolError,
        InvalidArgumentError,
        InvalidBlockError,
        InvalidTypeError,
        KVPoolError,
        OutOfBlocksError,
        PinLimitError,
        PinnedBlockError,
        PlanClosedError,
        PoolExhaustedError,
        PoolInterruptedError,
        PoolTooLargeError,
        StaleLeaseError,
        TraceError,
        UnknownDeviceError,
        UnknownSequenceError,
    )
    from kv_pool.ids import BlockHash, BlockId, BlockMove, GroupId, LeaseId, NodeName, RequestId, SequenceId
    from kv_pool.manager.admission import AllocStatus
    from kv_pool.manager.block_groups.kv_cache_spec import (
        ChunkedLocalAttentionSpec,
        CrossAttentionSpec,
        EncoderOnlyAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from kv_pool.manager.cached_prefix import CachedPrefix
    from kv_pool.manager.kv_cache_manager import KVCacheManager
    from kv_pool.manager.leases import BlockLeases, LeaseKind
    from kv_pool.manager.prefix_rules import PrefixRules
    from kv_pool.manager.requests.request import LoRARequest, MultiModalFeature, PlaceholderRange, Request
    from kv_pool.manager.requests.salt_region import SaltRegion
    from kv_pool.manager.retention.block_retention import BlockRetention
    from kv_pool.manager.retention.directive import RetentionDirective
    from kv_pool.manager.swap.plan import SwapPlan
    from kv_pool.manager.swap.swapper import BlockSwapper
    from kv_pool.metrics.residency import KVCacheMetricsCollector
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
            "kv_pool.adapter.gpu_kv_pool": ("GPUKVPool",),
            "kv_pool.adapter.victims": ("LRUEviction",),
            "kv_pool.core.block": ("KVCacheBlock",),
            "kv_pool.core.block_hash": ("BlockHasher",),
            "kv_pool.core.block_pool": ("BlockPool",),
            "kv_pool.core.free_queue": ("FreeKVCacheBlockQueue",),
            "kv_pool.core.hash_map": ("BlockHashToBlockMap",),
            "kv_pool.core.kv_events": (
                "BlockStored",
                "BlockRemoved",
                "AllBlocksCleared",
                "KVCacheEvent",
            ),
            "kv_pool.errors": (
                "KVPoolError",
                "InvalidArgumentError",
                "InvalidTypeError",
                "InvalidBlockError",
                "OutOfBlocksError",
                "PoolExhaustedError",
                "PoolTooLargeError",
                "UnknownSequenceError",
                "EvictedSequenceError",
                "ForkedPoolError",
                "UnknownDeviceError",
                "PinnedBlockError",
                "PinLimitError",
                "StaleLeaseError",
                "PlanClosedError",
                "CopyFailedError",
                "CorruptedPoolError",
                "PoolInterruptedError",
                "ControlError",
                "TraceError",
                "DrawingError",
            ),
            "kv_pool.ids": (
                "BlockHash",
                "BlockId",
                "BlockMove",
                "GroupId",
                "LeaseId",
                "NodeName",
                "RequestId",
                "SequenceId",
            ),
            "kv_pool.manager.admission": ("AllocStatus",),
            "kv_pool.manager.block_groups.kv_cache_spec": (
                "FullAttentionSpec",
                "SlidingWindowSpec",
                "ChunkedLocalAttentionSpec",
                "MambaSpec",
                "CrossAttentionSpec",
                "EncoderOnlyAttentionSpec",
            ),
            "kv_pool.manager.cached_prefix": ("CachedPrefix",),
            "kv_pool.manager.kv_cache_manager": ("KVCacheManager",),
            "kv_pool.manager.prefix_rules": ("PrefixRules",),
            "kv_pool.manager.leases": (
                "BlockLeases",
                "LeaseKind",
            ),
            "kv_pool.manager.requests.request": (
                "Request",
                "LoRARequest",
                "MultiModalFeature",
                "PlaceholderRange",
            ),
            "kv_pool.manager.requests.salt_region": ("SaltRegion",),
            "kv_pool.manager.retention.block_retention": ("BlockRetention",),
            "kv_pool.manager.retention.directive": ("RetentionDirective",),
            "kv_pool.manager.swap.plan": ("SwapPlan",),
            "kv_pool.manager.swap.swapper": ("BlockSwapper",),
            "kv_pool.metrics.residency": ("KVCacheMetricsCollector",),
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
    "KVCacheManager",
    "Request",
    "BlockHasher",
    "CachedPrefix",
    "PrefixRules",
    "AllocStatus",
    "LoRARequest",
    "MultiModalFeature",
    "PlaceholderRange",
    "SaltRegion",
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "MambaSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "BlockRetention",
    "RetentionDirective",
    "BlockSwapper",
    "SwapPlan",
    "BlockLeases",
    "LeaseKind",
    "GPUKVPool",
    "KVPoolProtocol",
    "BlockAllocationRequest",
    "AllocationResult",
    "BlockInfo",
    "Eviction",
    "MigrationResult",
    "LRUEviction",
    "BlockPool",
    "KVCacheBlock",
    "FreeKVCacheBlockQueue",
    "BlockHashToBlockMap",
    "BlockHash",
    "BlockMove",
    "BlockId",
    "GroupId",
    "RequestId",
    "SequenceId",
    "LeaseId",
    "NodeName",
    "KVCacheMetricsCollector",
    "BlockStored",
    "BlockRemoved",
    "AllBlocksCleared",
    "KVCacheEvent",
    "COMPILED",
    "__version__",
    "KVPoolError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "InvalidBlockError",
    "OutOfBlocksError",
    "PoolExhaustedError",
    "PoolTooLargeError",
    "UnknownSequenceError",
    "EvictedSequenceError",
    "ForkedPoolError",
    "UnknownDeviceError",
    "PinnedBlockError",
    "PinLimitError",
    "StaleLeaseError",
    "PlanClosedError",
    "CopyFailedError",
    "CorruptedPoolError",
    "PoolInterruptedError",
    "ControlError",
    "TraceError",
    "DrawingError",
]
