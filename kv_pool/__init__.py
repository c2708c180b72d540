"""kv_pool: a stand-alone KV-cache block pool with prefix caching, with the behaviour of vLLM v1's.

The core decides which block ids a request gets and which blocks hold which prefix. Start with
`KVCacheManager` (block tables for a scheduler), `GPUKVPool` (blocks by id, for sequences) or `BlockPool`
(blocks); see kv_pool/README.md for the map.

More names, each imported when it is first used:

    kv_pool.core            the block pool, hashes, events, holds
    kv_pool.manager         block tables for a scheduler: groups, forks, retention, leases
    kv_pool.contiguous      runs of consecutive ids, compaction, Defragmenter
    kv_pool.storage         the bytes of blocks: KVStorage, on CPU and GPU
    kv_pool.adapter         GPUKVPool, DevicePools, KVPoolMigrationManager, MigrationHook
    kv_pool.tiers           host memory and disk below a pool, swap, dumps
    kv_pool.migration       blocks that move between processes and nodes
    kv_pool.events          the event stream: publisher, subscriber, PrefixMirror
    kv_pool.lab          production traces through the pool
    kv_pool.control         a running pool from outside, as kv-pool stats sees it
    kv_pool.errors          every error

    kv_pool.reports.allocation_monitor          AllocationMonitor: a pool's counts over time
    kv_pool.integrations.attention              paged_attention: batched attention over blocks
    kv_pool.integrations.transformers           PagedCache, PagedSequences: transformers models on blocks
    kv_pool.integrations.nano_vllm              BlockManager: nano-vllm's
    kv_pool.integrations.sequence_allocator     KVCacheAllocator, SequencePageTable: K and V by position

To copy and change:

    examples/shared_prefixes.py      SharedPrefixManager: samples of one prompt, over a KVCacheAllocator
    examples/block_space_manager.py  BlockSpaceManager: groups of sequences, as in vLLM 0.6
    examples/paged_transformer.py    PagedAttention, PagedTransformerLayer, PagedInferenceEngine
    examples/recommended_sizes.py    AdaptiveBlockManager, SystemConfigOptimizer: sizes
"""

from kv_pool.lazy_names import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__)
