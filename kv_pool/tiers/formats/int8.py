"""int8: a signed byte an element; scales per channel for K, per token for V."""

from __future__ import annotations

import numpy as np

from kv_pool.tiers.formats.block_axes import BlockAxes
from kv_pool.tiers.formats.block_format import ByteArray, FloatArray
from kv_pool.tiers.formats.scaled import ScaledFormat

KEY_GROUP, VALUE_GROUP = "N", "D"


class Int8Codes:
    """-126 to 126; 127, -127 and -128 stand for the infinities and NaN."""

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
    """Off by at most half a scale, and by the rounding of the element type.

    Args:
        key_group, value_group: the axes over which elements share a scale: N for one a channel (and layer and
            head), D for one a token. By default keys have one a channel, since some of their channels are
            far larger than the others in trained models, whatever the token; values have one a token. What
            each choice costs and gives: benchmarks/experiment_cold_formats.py. A latent cache is as values.
    """
    return ScaledFormat("int8", axes, Int8Codes(), key_group, value_group)
