"""Element types of a KV cache by name, and what NumPy and torch call them."""

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
"""Names are torch's. Blocks are copied as bytes, so a type matters only to `write` and `read`."""

_UNSIGNED = {1: "uint8", 2: "uint16"}
# Signed, since torch indexes few of the wider unsigned types.
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def find_dtype_bytes(name: str) -> int:
    """Bytes of one element. Raises InvalidArgumentError naming the types there are."""
    if name not in DTYPE_BYTES:
        raise InvalidArgumentError(f"unknown dtype {name!r}; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's type of that name; where it has none (bfloat16, float8), unsigned integers of the same bits."""
    if name.startswith(("bfloat", "float8")):
        return np.dtype(_UNSIGNED[find_dtype_bytes(name)])
    return np.dtype(name)


def bits_name(itemsize: int) -> str:
    """The integers that stand for elements of so many bytes while they are stored, as NumPy and torch say."""
    return _BITS[itemsize]
