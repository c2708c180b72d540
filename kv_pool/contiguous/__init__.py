"""Runs of consecutive block ids, and compaction, which moves other blocks out of their way."""

from kv_pool.lazy_names import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__)
