"""Migration of blocks between pools of one process, of several processes, and of several nodes."""

from kv_pool.lazy_names import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__)
