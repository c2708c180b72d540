"""The event stream: publisher, subscriber, snapshots, and an index of what engines hold."""

from kv_pool.lazy_names import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__)
