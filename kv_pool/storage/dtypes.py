"""Element types of a KV cache, and their names in NumPy and torch."""

from typing import Any

import numpy as np

from kv_pool.errors import InvalidArgumentError

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element, by torch's name. Blocks are copied as bytes: only `write` and `read` use the type."""

_UNSIGNED = {1: "uint8", 2: "uint16"}
# Signed, because torch indexing supports few of the wider unsigned types.
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def find_dtype_bytes(name: str) -> int:
    """Return the bytes of one element. Raise InvalidArgumentError with the known types."""
    if name not in DTYPE_BYTES:
        raise InvalidArgumentError(f"unknown dtype {name!r}; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's type of that name, or unsigned integers of the same width (bfloat16, float8)."""
    if name.startswith(("bfloat", "float8")):
        return np.dtype(_UNSIGNED[find_dtype_bytes(name)])
    return np.dtype(name)


def bits_name(itemsize: int) -> str:
    """Return the name, in NumPy and torch, of the integer type that stores elements of `itemsize` bytes."""
    return _BITS[itemsize]
