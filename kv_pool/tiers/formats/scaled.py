"""The formats int8, int4 and fp8: one code per element, and one scale per group of elements."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kv_pool.errors import MissingDependencyError, describe_install
from kv_pool.tiers.formats.block_format import (
    FLOATS,
    BlockAxes,
    ByteArray,
    ChunkedFormat,
    FloatArray,
    narrow_up,
    widen,
)

_SCALE_BYTES = 2
KEY_GROUP, VALUE_GROUP = "N", "D"


class Codes(Protocol):
    """Codes for numbers between -largest and largest, and up to three codes for NaN and the infinities.

    Attributes:
        num_bits: bits per code, 8 or 4; two 4-bit codes share a byte.
    """

    num_bits: int
    largest: float
    nan_byte: int
    plus_infinity_byte: int
    minus_infinity_byte: int

    def to_bytes(self, values: FloatArray) -> ByteArray:
        """Encode numbers to one byte each. A number may exceed `largest` only by a rounding error."""

    def from_bytes(self, codes: ByteArray) -> FloatArray:
        """Decode bytes to numbers. The result for the three non-finite codes is arbitrary."""


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


class ScaledFormat(ChunkedFormat):
    """A block format with scaled codes; see `make_int8_format`, `make_int4_format` and `make_fp8_format`.

        |<-- codes of the elements, in the order of the block -->|<-- scales of K -->|<-- scales of V -->|

    Args:
        key_group, value_group: the axes of K and of V over which elements share a scale.

    A scale is the largest finite magnitude of its group divided by `codes.largest`, rounded up to bfloat16: 2
    bytes with the range of float32, at most 1/128 too large. A group whose largest magnitude is below 1e-42
    may decode to zeros. NaN and the infinities do not affect scales; they decode to themselves, or all to NaN
    if the codes have no infinities.
    """

    chunk_elements = 1 << 18  # intermediate arrays stay in the processor's cache

    def __init__(self, name: str, axes: BlockAxes, codes: Codes, key_group: str, value_group: str) -> None:
        super().__init__(name, axes)
        self.codes = codes
        groups = (key_group, value_group) if axes.has_values else (value_group,)
        self._groups = [axes.get_places(group) for group in groups]
        kv_axis = axes.kv_place
        part = [size for place, size in enumerate((0, *axes.shape)) if place != kv_axis]
        self._scale_shapes = [
            tuple(1 if place in group else size for place, size in enumerate(part))[1:]
            for group in self._groups
        ]
        num_scales = sum(int(np.prod(shape)) for shape in self._scale_shapes)
        self._code_bytes = -(-axes.num_elements * codes.num_bits // 8)
        self.encoded_bytes = self._code_bytes + num_scales * _SCALE_BYTES

    def _encode_chunk(self, blocks: ByteArray, encoded: ByteArray) -> None:
        values = self.axes.to_floats(blocks)
        is_finite = np.isfinite(values)
        original = None
        if not is_finite.all():
            original = values.copy()
            values[~is_finite] = 0
        start = self._code_bytes
        for which, group in enumerate(self._groups):
            part = self._get_part(values, which)
            largest = np.abs(part).max(group, keepdims=True)
            scales = narrow_up(np.ascontiguousarray(largest / np.float32(self.codes.largest)))
            divisors = widen(scales)
            divisors[divisors == 0] = 1  # groups that are all zeros
            np.divide(part, divisors, out=part)
            end = start + scales[0].nbytes
            encoded[:, start:end] = scales.reshape(len(blocks), -1).view(np.uint8)
            start = end
        codes = self.codes.to_bytes(values)
        if original is not None:
            codes[np.isnan(original)] = self.codes.nan_byte
            codes[np.isposinf(original)] = self.codes.plus_infinity_byte
            codes[np.isneginf(original)] = self.codes.minus_infinity_byte
        encoded[:, : self._code_bytes] = self._pack(codes.reshape(len(blocks), -1))

    def _decode_chunk(self, encoded: ByteArray) -> ByteArray:
        num_blocks = len(encoded)
        codes = self._unpack(encoded[:, : self._code_bytes]).reshape(num_blocks, *self.axes.shape)
        values = self.codes.from_bytes(codes)
        start = self._code_bytes
        for which, shape in enumerate(self._scale_shapes):
            end = start + int(np.prod(shape)) * _SCALE_BYTES
            scales = np.ascontiguousarray(encoded[:, start:end]).view(np.uint16)
            part = self._get_part(values, which)
            np.multiply(part, widen(scales).reshape(num_blocks, *shape), out=part)
            start = end
        limit = np.float32(FLOATS[self.axes.dtype])
        np.clip(values, -limit, limit, out=values)  # scales are rounded up; the largest may overflow
        self._restore(codes, values)
        return self.axes.from_floats(values)

    def _pack(self, codes: ByteArray) -> ByteArray:
        """Pack (n, num_elements) codes into bytes: two 4-bit codes per byte, the first in the low bits."""
        if self.codes.num_bits == 8:
            return codes
        low, high = codes[:, 0::2], codes[:, 1::2]
        packed = low.copy()
        packed[:, : high.shape[1]] |= high << 4
        return packed

    def _unpack(self, packed: ByteArray) -> ByteArray:
        """Invert `_pack`."""
        if self.codes.num_bits == 8:
            return packed
        codes = np.empty((len(packed), 2 * packed.shape[1]), np.uint8)
        codes[:, 0::2] = packed & 15
        codes[:, 1::2] = packed >> 4
        return codes[:, : self.axes.num_elements]

    def _get_part(self, values: FloatArray, which: int) -> FloatArray:
        """Return K or V as a view without the K/V axis."""
        index: tuple[Any, ...] = (slice(None),) * self.axes.kv_place
        part: FloatArray = values[(*index, which)]
        return part

    def _restore(self, codes: ByteArray, values: npt.NDArray[np.float32]) -> None:
        for byte, value in (
            (self.codes.plus_infinity_byte, np.inf),
            (self.codes.minus_infinity_byte, -np.inf),
            (self.codes.nan_byte, np.nan),
        ):
            is_there = codes == byte
            if is_there.any():
                values[is_there] = value


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


def make_fp8_format(axes: BlockAxes) -> ScaledFormat:
    """Return the format fp8.

    Error: at most 1/16 of the element or 1/1024 of the scale, whichever is larger, plus the rounding of the
    element type.

    Raises:
        MissingDependencyError: ml_dtypes is not installed.
    """
    return ScaledFormat("fp8", axes, Float8Codes(), "ND", "ND")
