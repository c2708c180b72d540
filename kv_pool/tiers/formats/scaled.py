"""The formats int8, int4 and fp8: one code per element, and one scale per group of elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class IntegerCodes:
    """Codes for integers between -largest and largest, and up to three codes for NaN and the infinities.

    Attributes:
        num_bits: bits per code, 8 or 4; two 4-bit codes share a byte.
        offset: the byte of a code is the integer plus this.
    """

    num_bits: int
    largest: float
    offset: int
    nan_byte: int
    plus_infinity_byte: int
    minus_infinity_byte: int

    def to_bytes(self, values: FloatArray) -> ByteArray:
        """Encode numbers to one byte each. A number may exceed `largest` only by a rounding error."""
        np.rint(values, out=values)
        np.clip(values, -self.largest, self.largest, out=values)
        if self.offset:
            values += self.offset
        return values.astype(np.int8).view(np.uint8)

    def from_bytes(self, codes: ByteArray) -> FloatArray:
        """Decode bytes to numbers. The result for the three non-finite codes is arbitrary."""
        values: FloatArray = codes.view(np.int8).astype(np.float32)
        if self.offset:
            values -= self.offset
        return values


INT8 = IntegerCodes(8, 126.0, 0, nan_byte=128, plus_infinity_byte=127, minus_infinity_byte=129)
INT4 = IntegerCodes(4, 7.0, 8, nan_byte=0, plus_infinity_byte=0, minus_infinity_byte=0)
"""Code 0 encodes NaN and the infinities; all decode to NaN."""


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
    """A block format with scaled codes.

        |<-- codes of the elements, in the order of the block -->|<-- scales of K -->|<-- scales of V -->|

    Args:
        key_group, value_group: the axes of K and of V over which elements share a scale: N for one scale per
            channel, D for one per token, ND for one per head, always per layer and head. In trained models
            some channels of K are much larger than the others for every token, so int8 and int4 scale keys
            per channel and values per token. benchmarks/experiment_cold_formats.py measures the choices. A
            latent cache uses `value_group`.

    A scale is the largest finite magnitude of its group divided by `codes.largest`, rounded up to bfloat16: 2
    bytes with the range of float32, at most 1/128 too large. A group whose largest magnitude is below 1e-42
    may decode to zeros. NaN and the infinities do not affect scales; they decode to themselves, or all to NaN
    if the codes have no infinities.

    Error, beside the rounding of the element type: with integers at most half a scale, which is 1/252 of the
    largest magnitude in the group for int8 and 1/14 for int4; with fp8 at most 1/16 of the element or 1/1024
    of the scale, whichever is larger.
    """

    chunk_elements = 1 << 18  # intermediate arrays stay in the processor's cache

    def __init__(
        self,
        name: str,
        axes: BlockAxes,
        codes: IntegerCodes | Float8Codes,
        key_group: str,
        value_group: str,
    ) -> None:
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
        super().__init__(name, axes, self._code_bytes + num_scales * _SCALE_BYTES)

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
