"""The control socket of a running pool: its server, its client, and their reports."""

from kv_pool.lazy_names import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__)
