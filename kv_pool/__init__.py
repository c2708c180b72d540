"""kv_pool: a stand-alone KV-cache block pool with prefix caching, in the manner of vLLM v1.

The core decides which block ids a request gets and which blocks hold which prefix. Start with
`KVCacheManager` (block tables for a scheduler) or `BlockPool` (blocks); see kv_pool/README.md for the map.
"""

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_hash import BlockHasher
from kv_pool.core.block_pool import BlockPool
from kv_pool.core.free_queue import FreeKVCacheBlockQueue
from kv_pool.core.hash_map import BlockHashToBlockMap
from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kv_pool.core.mode import COMPILED
from kv_pool.errors import (
    CopyFailedError,
    CorruptedPoolError,
    InvalidArgumentError,
    InvalidBlockError,
    InvalidTypeError,
    KVPoolError,
    OutOfBlocksError,
    TraceError,
)
from kv_pool.ids import BlockMove
from kv_pool.manager.kv_cache_manager import CachedPrefix, KVCacheManager
from kv_pool.manager.request import LoRARequest, MultiModalFeature, PlaceholderRange, Request
from kv_pool.metrics.residency import KVCacheMetricsCollector
from kv_pool.version import __version__

__all__ = [
    "COMPILED",
    "AllBlocksCleared",
    "BlockHashToBlockMap",
    "BlockHasher",
    "BlockMove",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CachedPrefix",
    "CopyFailedError",
    "CorruptedPoolError",
    "FreeKVCacheBlockQueue",
    "InvalidArgumentError",
    "InvalidBlockError",
    "InvalidTypeError",
    "KVCacheBlock",
    "KVCacheEvent",
    "KVCacheManager",
    "KVCacheMetricsCollector",
    "KVPoolError",
    "LoRARequest",
    "MultiModalFeature",
    "OutOfBlocksError",
    "PlaceholderRange",
    "Request",
    "TraceError",
    "__version__",
]
