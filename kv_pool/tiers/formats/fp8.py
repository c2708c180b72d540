"""The format fp8: e4m3, one byte per element with 3 mantissa bits; one scale per layer, K or V, and head."""

from __future__ import annotations

import numpy as np

from kv_pool.errors import MissingDependencyError, describe_install
from kv_pool.tiers.formats.block_axes import BlockAxes
from kv_pool.tiers.formats.block_format import ByteArray, FloatArray
from kv_pool.tiers.formats.scaled import ScaledFormat


class Float8Codes:
    """e4m3 codes, rounded by ml_dtypes, up to 416. The largest e4m3 number, 448, encodes infinity."""

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
                f"the block format fp8 needs ml_dtypes: {describe_install('formats')}"
            ) from error
        self._dtype = ml_dtypes.float8_e4m3fn
        # A table look-up takes a seventh of the conversion's time.
        self._floats = np.arange(256, dtype=np.uint8).view(self._dtype).astype(np.float32)

    def to_bytes(self, values: FloatArray) -> ByteArray:
        return values.astype(self._dtype).view(np.uint8)

    def from_bytes(self, codes: ByteArray) -> FloatArray:
        return np.take(self._floats, codes)


def make_fp8_format(axes: BlockAxes) -> ScaledFormat:
    """Return the format fp8.

    Error: at most 1/16 of the element or 1/1024 of the scale, whichever is larger, plus the rounding of the
    element type.

    Raises:
        MissingDependencyError: ml_dtypes is not installed.
    """
    return ScaledFormat("fp8", axes, Float8Codes(), "ND", "ND")
