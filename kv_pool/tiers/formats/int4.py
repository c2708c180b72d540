"""The format int4: half a byte per element; one scale per channel for K, per token for V, as in int8."""

from __future__ import annotations

import numpy as np

from kv_pool.tiers.formats.block_axes import BlockAxes
from kv_pool.tiers.formats.block_format import ByteArray, FloatArray
from kv_pool.tiers.formats.int8 import KEY_GROUP, VALUE_GROUP
from kv_pool.tiers.formats.scaled import ScaledFormat


class Int4Codes:
    """Codes 1 to 15 for -7 to 7. Code 0 encodes NaN and the infinities; all decode to NaN."""

    num_bits = 4
    largest = 7.0
    nan_byte = 0
    plus_infinity_byte = 0
    minus_infinity_byte = 0

    def to_bytes(self, values: FloatArray) -> ByteArray:
        np.rint(values, out=values)
        np.clip(values, -7, 7, out=values)
        return (values + np.float32(8)).astype(np.uint8)

    def from_bytes(self, codes: ByteArray) -> FloatArray:
        return codes.astype(np.float32) - np.float32(8)


def make_int4_format(
    axes: BlockAxes, key_group: str = KEY_GROUP, value_group: str = VALUE_GROUP
) -> ScaledFormat:
    """Return the format int4: a quarter of a 16-bit block's bytes, plus the scales.

    Error: at most half a scale, which is 1/14 of the largest magnitude in the group, plus the rounding of
    the element type. Infinities decode to NaN.

    Args:
        key_group, value_group: as for `make_int8_format`.
    """
    return ScaledFormat("int4", axes, Int4Codes(), key_group, value_group)
