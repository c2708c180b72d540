"""Production traces, replayed through the manager and the pool that an engine uses."""

from kv_pool.lazy_names import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__)
