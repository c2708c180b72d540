"""The bytes of blocks: segment tables, KV tensors per device, moves applied on CPU and GPU."""

from kv_pool.storage.block_storage import BlockStorage
from kv_pool.storage.kv_storage import KVStorage
from kv_pool.storage.segments import Segment, SegmentTable

__all__ = ["BlockStorage", "KVStorage", "Segment", "SegmentTable"]
