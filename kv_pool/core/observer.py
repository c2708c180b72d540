"""The hooks through which a pool lets itself be watched."""

from typing import Protocol

from kv_pool.core.block import KVCacheBlock


class BlockObserver(Protocol):
    """What `BlockPool(metrics_collector=...)` calls, in the order things happen to a block.

    `on_block_evicted` comes before `on_block_allocated` of the same hand-out, and is called for every
    block taken while caching is on, whether or not it still had a hash. Hooks must not raise nor call
    back into the pool. Contract: vLLM 0.33 `KVCacheMetricsCollector`.
    """

    def on_block_allocated(self, block: KVCacheBlock) -> None: ...

    def on_block_accessed(self, block: KVCacheBlock) -> None: ...

    def on_block_evicted(self, block: KVCacheBlock) -> None: ...

    def reset(self) -> None: ...
