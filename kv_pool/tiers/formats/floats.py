"""Between the bytes of 16- and 32-bit floats and NumPy's float32, bfloat16 included, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kv_pool.tiers.formats.block_format import ByteArray, FloatArray

FLOATS = {
    "float16": float(np.finfo(np.float16).max),
    "bfloat16": float(np.uint32(0x7F7F0000).view(np.float32)),
    "float32": float(np.finfo(np.float32).max),
}
"""The element types, and the largest number of each."""

UINT16 = npt.NDArray[np.uint16]


def to_floats(elements: ByteArray, dtype: str) -> FloatArray:
    """(n, bytes) to (n, elements), exact, a copy."""
    if dtype == "bfloat16":
        return widen(elements.view(np.uint16))
    values: FloatArray = elements.view(dtype).astype(np.float32)
    return values


def from_floats(values: FloatArray, dtype: str) -> ByteArray:
    """(n, elements) to (n, bytes): to nearest, ties to even. Beyond the largest is infinity."""
    made: npt.NDArray[Any]
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        made = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        made[np.isnan(values)] = 0x7FC0  # rounding may have carried a NaN over into another number
    else:
        made = values.astype(dtype)
    return made.view(np.uint8)


def narrow_up(scales: FloatArray) -> UINT16:
    """The bfloat16 that is not below each of these, which are 0 or more and far from the largest."""
    narrow: UINT16 = ((scales.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    return narrow


def widen(bits: UINT16) -> FloatArray:
    """The float32 of each of these bfloat16."""
    widened: FloatArray = (bits.astype(np.uint32) << 16).view(np.float32)
    return widened
