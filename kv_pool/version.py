"""The version of kv_pool."""

__version__ = "0.3.0"
