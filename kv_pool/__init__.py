"""kv_pool: a stand-alone KV-cache block pool with prefix caching, in the manner of vLLM v1.

The core decides which block ids a request gets and which blocks hold which prefix. Start with
`KVCacheManager` (block tables for a scheduler), `GPUKVPool` (blocks by id, for sequences) or `BlockPool`
(blocks); see kv_pool/README.md for the map.
"""

from kv_pool.adapter import GPUKVPool, LRUEviction
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_hash import BlockHasher
from kv_pool.core.block_pool import BlockPool
from kv_pool.core.free_queue import FreeKVCacheBlockQueue
from kv_pool.core.hash_map import BlockHashToBlockMap
from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kv_pool.core.mode import COMPILED
from kv_pool.errors import (
    ControlError,
    CopyFailedError,
    CorruptedPoolError,
    DrawingError,
    EvictedSequenceError,
    InvalidArgumentError,
    InvalidBlockError,
    InvalidTypeError,
    KVPoolError,
    OutOfBlocksError,
    PinLimitError,
    PinnedBlockError,
    PlanClosedError,
    PoolExhaustedError,
    PoolTooLargeError,
    StaleLeaseError,
    TraceError,
    UnknownDeviceError,
    UnknownSequenceError,
)
from kv_pool.ids import BlockHash, BlockMove
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
from kv_pool.manager.requests.request import LoRARequest, MultiModalFeature, PlaceholderRange, Request
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
from kv_pool.version import __version__

__all__ = [
    "COMPILED",
    "AllBlocksCleared",
    "AllocStatus",
    "AllocationResult",
    "BlockAllocationRequest",
    "BlockHash",
    "BlockHashToBlockMap",
    "BlockHasher",
    "BlockInfo",
    "BlockLeases",
    "BlockMove",
    "BlockPool",
    "BlockRemoved",
    "BlockRetention",
    "BlockStored",
    "BlockSwapper",
    "CachedPrefix",
    "ChunkedLocalAttentionSpec",
    "ControlError",
    "CopyFailedError",
    "CorruptedPoolError",
    "CrossAttentionSpec",
    "DrawingError",
    "EncoderOnlyAttentionSpec",
    "EvictedSequenceError",
    "Eviction",
    "FreeKVCacheBlockQueue",
    "FullAttentionSpec",
    "GPUKVPool",
    "InvalidArgumentError",
    "InvalidBlockError",
    "InvalidTypeError",
    "KVCacheBlock",
    "KVCacheEvent",
    "KVCacheManager",
    "KVCacheMetricsCollector",
    "KVPoolError",
    "KVPoolProtocol",
    "LRUEviction",
    "LeaseKind",
    "LoRARequest",
    "MambaSpec",
    "MigrationResult",
    "MultiModalFeature",
    "OutOfBlocksError",
    "PinLimitError",
    "PinnedBlockError",
    "PlaceholderRange",
    "PlanClosedError",
    "PoolExhaustedError",
    "PoolTooLargeError",
    "Request",
    "RetentionDirective",
    "SlidingWindowSpec",
    "StaleLeaseError",
    "SwapPlan",
    "TraceError",
    "UnknownDeviceError",
    "UnknownSequenceError",
    "__version__",
]
