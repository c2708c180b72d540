"""`KVPoolProtocol` over a block pool: sequences and block ids instead of block objects."""

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.adapter.victims import EvictionPolicy, LRUEviction, SequenceInfo

__all__ = [
    "EvictionPolicy",
    "GPUKVPool",
    "LRUEviction",
    "SequenceInfo",
]
