"""vLLM's classes, for tests that compare with them. Importing this module requires vLLM."""

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core import block_pool
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

__all__ = [
    "BlockHashToBlockMap",
    "BlockPool",
    "BlockStored",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "KVCacheMetricsCollector",
]


class BlockPool(block_pool.BlockPool):
    """vLLM's pool, with a block's secondary keys in insertion order.

    vLLM stores them in a set of bytes, whose order differs from process to process, and iterates over it to
    remove and move them.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.cached_block_hashes_by_block = SecondaryKeys()


class SecondaryKeys(dict):
    def setdefault(self, block_id, empty):
        assert empty == set()
        return super().setdefault(block_id, KeysInOrder())


class KeysInOrder(dict):
    def add(self, key):
        self[key] = None
