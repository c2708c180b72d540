"""`COMPILED`: how the core runs in this installation."""

from kv_pool.core import pool_core

COMPILED: bool = not str(pool_core.__file__).endswith(".py")
"""True when the core runs compiled by mypyc, False when it runs as plain Python."""
