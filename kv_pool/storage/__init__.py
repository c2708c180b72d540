"""The bytes of blocks: KV tensors per device, segment tables, moves on CPU and GPU."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_pool.errors import CopyFailedError, LayoutMismatchError
    from kv_pool.storage.block_layout import BlockLayout
    from kv_pool.storage.block_storage import BlockStorage
    from kv_pool.storage.kv_storage import KVStorage
    from kv_pool.storage.segments import Segment, SegmentTable
    from kv_pool.storage.sharded_storage import ShardedStorage
else:
    from kv_pool.lazy_names import export_lazily

    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "kv_pool.errors": (
                "LayoutMismatchError",
                "CopyFailedError",
            ),
            "kv_pool.storage.block_layout": ("BlockLayout",),
            "kv_pool.storage.block_storage": ("BlockStorage",),
            "kv_pool.storage.kv_storage": ("KVStorage",),
            "kv_pool.storage.segments": (
                "Segment",
                "SegmentTable",
            ),
            "kv_pool.storage.sharded_storage": ("ShardedStorage",),
        },
    )

__all__ = [
    "KVStorage",
    "BlockLayout",
    "BlockStorage",
    "ShardedStorage",
    "Segment",
    "SegmentTable",
    "LayoutMismatchError",
    "CopyFailedError",
]
