"""fp8: e4m3, a byte an element with 3 bits of mantissa; one scale for each layer, K or V, and head."""

from __future__ import annotations

import numpy as np

from kv_pool.errors import MissingDependencyError, describe_install
from kv_pool.tiers.formats.block_axes import BlockAxes
from kv_pool.tiers.formats.block_format import ByteArray, FloatArray
from kv_pool.tiers.formats.scaled import ScaledFormat


class Float8Codes:
    """e4m3 as ml_dtypes rounds it, up to 416; the largest it has, 448, stands for infinity."""

    num_bits = 8
    largest = 416.0
    plus_infinity_byte = 0x7E
    minus_infinity_byte = 0xFE
    nan_byte = 0x7F

    def __init__(self) -> None:
        try:
            import ml_dtypes
        except ImportError as error:
            raise MissingDependencyError(
                f"writing blocks as fp8 needs ml_dtypes: {describe_install('formats')}"
            ) from error
        self._dtype = ml_dtypes.float8_e4m3fn
        # A table takes a seventh of the time that the conversion does.
        self._floats = np.arange(256, dtype=np.uint8).view(self._dtype).astype(np.float32)

    def to_bytes(self, values: FloatArray) -> ByteArray:
        return values.astype(self._dtype).view(np.uint8)

    def from_bytes(self, codes: ByteArray) -> FloatArray:
        return np.take(self._floats, codes)


def make_fp8_format(axes: BlockAxes) -> ScaledFormat:
    """Off by at most 1/16 of the element, or 1/1024 of the scale where that is more; and by rounding.

    Raises:
        MissingDependencyError: ml_dtypes is not installed.
    """
    return ScaledFormat("fp8", axes, Float8Codes(), "ND", "ND")
