"""Reports about a running pool: block states, layout, statistics, sequences and holds."""

from kv_pool.lazy_names import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__)
