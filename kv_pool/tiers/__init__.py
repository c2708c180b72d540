"""Host memory and disk below a pool: offload, onboard, prefetch, swap, and dumps for warm restarts."""

from kv_pool.lazy_names import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__)
