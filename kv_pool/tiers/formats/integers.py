"""The formats int8 and int4: one byte, or half, per element; one scale per channel for K, per token for V."""

from __future__ import annotations

import numpy as np

from kv_pool.tiers.formats.block_axes import BlockAxes
from kv_pool.tiers.formats.block_format import ByteArray, FloatArray
from kv_pool.tiers.formats.scaled import ScaledFormat

KEY_GROUP, VALUE_GROUP = "N", "D"


class Int8Codes:
    """Codes -126 to 126; 127, -127 and -128 encode plus infinity, minus infinity and NaN."""

    num_bits = 8
    largest = 126.0
    plus_infinity_byte = 127
    minus_infinity_byte = 129
    nan_byte = 128

    def to_bytes(self, values: FloatArray) -> ByteArray:
        np.rint(values, out=values)
        np.clip(values, -126, 126, out=values)
        return values.astype(np.int8).view(np.uint8)

    def from_bytes(self, codes: ByteArray) -> FloatArray:
        return codes.view(np.int8).astype(np.float32)


def make_int8_format(
    axes: BlockAxes, key_group: str = KEY_GROUP, value_group: str = VALUE_GROUP
) -> ScaledFormat:
    """Return the format int8: half of a 16-bit block's bytes, plus the scales.

    Error: at most half a scale, plus the rounding of the element type.

    Args:
        key_group, value_group: the axes over which elements share a scale: N for one scale per channel, D for
            one per token, always per layer and head. By default keys have one scale per channel, because in
            trained models some channels of K are much larger than the others for every token; values have
            one per token. benchmarks/experiment_cold_formats.py measures the choices. A latent cache uses
            `value_group`.
    """
    return ScaledFormat("int8", axes, Int8Codes(), key_group, value_group)


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
