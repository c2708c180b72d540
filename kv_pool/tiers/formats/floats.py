"""Converts the bytes of float16, bfloat16 and float32 elements to NumPy float32 and back, without torch."""

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
"""The supported element types, with the largest finite number of each."""

UINT16 = npt.NDArray[np.uint16]


def to_floats(elements: ByteArray, dtype: str) -> FloatArray:
    """Convert (n, bytes) uint8 to (n, elements) float32; exact, a copy."""
    if dtype == "bfloat16":
        return widen(elements.view(np.uint16))
    values: FloatArray = elements.view(dtype).astype(np.float32)
    return values


def from_floats(values: FloatArray, dtype: str) -> ByteArray:
    """Convert (n, elements) float32 to (n, bytes) uint8: nearest, ties to even; overflow gives infinity."""
    made: npt.NDArray[Any]
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        made = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        made[np.isnan(values)] = 0x7FC0  # rounding may have turned a NaN into another number
    else:
        made = values.astype(dtype)
    return made.view(np.uint8)


def narrow_up(scales: FloatArray) -> UINT16:
    """Round non-negative numbers up to bfloat16. They must be far below the largest bfloat16."""
    narrow: UINT16 = ((scales.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    return narrow


def widen(bits: UINT16) -> FloatArray:
    """Convert bfloat16 bits to float32."""
    widened: FloatArray = (bits.astype(np.uint32) << 16).view(np.float32)
    return widened
