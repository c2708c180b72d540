"""The block pool: which block ids a request gets, and which blocks hold which prefix. No tensors."""

from kv_pool.lazy_names import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__)
