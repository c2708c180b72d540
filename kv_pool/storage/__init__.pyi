# What type checkers see of this package, and what it offers: each name is imported when it is first used.

from kv_pool.storage.kv_storage import KVStorage as KVStorage
from kv_pool.storage.block_layout import BlockLayout as BlockLayout
from kv_pool.storage.block_storage import BlockStorage as BlockStorage
from kv_pool.storage.sharded_storage import ShardedStorage as ShardedStorage
from kv_pool.storage.segments import Segment as Segment
from kv_pool.storage.segments import SegmentTable as SegmentTable
from kv_pool.errors import LayoutMismatchError as LayoutMismatchError
from kv_pool.errors import CopyFailedError as CopyFailedError
