"""The bytes of blocks: KV tensors per device, segment tables, moves on CPU and GPU."""

from kv_pool.lazy_names import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__)
