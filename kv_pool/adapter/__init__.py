"""`GPUKVPool`, the `KVPoolProtocol` over a block pool: sequences and block ids instead of block objects."""

from kv_pool.lazy_names import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__)
