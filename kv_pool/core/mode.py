"""`COMPILED`: whether the core runs compiled in this installation."""

from kv_pool.core import block

COMPILED: bool = not str(block.__file__).endswith(".py")
"""True when the core runs compiled by mypyc, False when it runs as plain Python."""
