"""Block tables for a scheduler: requests, prefix hits, forks, preemption, retention, leases."""

from kv_pool.lazy_names import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__)
