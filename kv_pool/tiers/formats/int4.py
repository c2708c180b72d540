"""int4: half a byte an element; scales per channel for K, per token for V, as int8 has them."""

from __future__ import annotations

import numpy as np

from kv_pool.tiers.formats.block_axes import BlockAxes
from kv_pool.tiers.formats.block_format import ByteArray, FloatArray
from kv_pool.tiers.formats.int8 import KEY_GROUP, VALUE_GROUP
from kv_pool.tiers.formats.scaled import ScaledFormat


class Int4Codes:
    """-7 to 7 as 1 to 15; 0 stands for all that is not finite, which comes back as NaN."""

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
    """Off by at most half a scale, 1/14 of the largest of a group, and by the rounding of the element type.

    A quarter of a 16-bit block's bytes, and the scales. The infinities come back as NaN.

    Args:
        key_group, value_group: as for `make_int8_format`.
    """
    return ScaledFormat("int4", axes, Int4Codes(), key_group, value_group)
