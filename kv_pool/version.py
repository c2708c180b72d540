"""The version of kv_pool."""

__version__ = "0.2.0"
