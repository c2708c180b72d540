"""`BlockFormat`: an encoding of blocks; `ChunkedFormat`: one that reads elements; `BlockAxes`: their axes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kv_pool.errors import InvalidArgumentError
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.storage.tensors import DTYPE_BYTES

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]


class BlockFormat:
    """An encoding of blocks: converts raw block bytes to stored bytes and back. This class is the format raw.

    Each block is encoded separately and can be decoded alone. A lossy format is not idempotent: encoding a
    decoded block again adds a further error, so do not pass blocks through a lossy format twice.

    Attributes:
        name: the argument of `make_format` for the same format; tiers store it.
        block_bytes, encoded_bytes: size of a block, raw and encoded, the same for every block.
    """

    def __init__(self, name: str, block_bytes: int, encoded_bytes: int) -> None:
        self.name = name
        self.block_bytes = block_bytes
        self.encoded_bytes = encoded_bytes

    def encode(self, blocks: ByteArray) -> ByteArray:
        """Encode (n, block_bytes) uint8 to (n, encoded_bytes) uint8. Accepts NaN and infinities.

        Raises:
            InvalidArgumentError: the array has another shape or type.
        """
        return check_rows(blocks, self.block_bytes)

    def decode(self, encoded: ByteArray) -> ByteArray:
        """Decode (n, encoded_bytes) uint8 to (n, block_bytes) uint8, within the format's documented error.

        Bytes that `encode` did not produce decode to arbitrary numbers; verify a checksum first.

        Raises:
            InvalidArgumentError: the array has another shape or type.
        """
        return check_rows(encoded, self.encoded_bytes)


def check_rows(rows: Any, num_bytes: int) -> ByteArray:
    """Return the rows as a contiguous array.

    Raises:
        InvalidArgumentError: the rows are not (n, num_bytes) uint8.
    """
    array: npt.NDArray[Any] = np.asarray(rows)
    if array.ndim != 2 or array.shape[1] != num_bytes or array.dtype != np.uint8:
        raise InvalidArgumentError(
            f"blocks must be an array of shape (n, {num_bytes}) and type uint8, not {array.shape} and "
            f"{array.dtype}"
        )
    return np.ascontiguousarray(array)


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


LETTERS = "L2NHD"


@dataclass(frozen=True)
class BlockAxes:
    """The axes of a block, outermost first, each of L 2 N H D once.

    An axis that the block format omits has size 1 and is listed first. A latent cache (MLA) has no K/V axis;
    its axis `2` has size 1.
    """

    dtype: str
    letters: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements in a block."""
        return prod(self.shape)

    @property
    def block_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def kv_place(self) -> int:
        """Index of the K/V axis in an array of blocks; axis 0 is the blocks."""
        return 1 + self.letters.index("2")

    @property
    def has_values(self) -> bool:
        """True if a block holds K and V; False for one latent vector per token."""
        return self.get_size("2") == 2

    def get_size(self, letter: str) -> int:
        """Return the size of an axis."""
        return self.shape[self.letters.index(letter)]

    def get_places(self, letters: str) -> tuple[int, ...]:
        """Return the indexes of these axes in an array of blocks without the K/V axis."""
        rest = self.letters.replace("2", "")
        return tuple(1 + rest.index(letter) for letter in letters)

    def to_floats(self, blocks: ByteArray) -> FloatArray:
        """Convert (n, block_bytes) uint8 to (n, *shape) float32, a copy."""
        return to_floats(blocks, self.dtype).reshape(len(blocks), *self.shape)

    def from_floats(self, values: FloatArray) -> ByteArray:
        """Convert (n, *shape) float32 to (n, block_bytes) uint8, rounded to the nearest element value."""
        return from_floats(values.reshape(len(values), self.num_elements), self.dtype)


class ChunkedFormat(BlockFormat, ABC):
    """A `BlockFormat` of blocks with axes, which encodes and decodes a few blocks at a time.

    Attributes:
        chunk_elements: number of elements of these blocks; at least one block.
    """

    chunk_elements: ClassVar[int]

    def __init__(self, name: str, axes: BlockAxes, encoded_bytes: int) -> None:
        super().__init__(name, axes.block_bytes, encoded_bytes)
        self.axes = axes

    def encode(self, blocks: ByteArray) -> ByteArray:
        blocks = super().encode(blocks)
        encoded = np.empty((len(blocks), self.encoded_bytes), np.uint8)
        with np.errstate(all="ignore"):
            for some in self._iterate_chunks(len(blocks)):
                self._encode_chunk(blocks[some], encoded[some])
        return encoded

    def decode(self, encoded: ByteArray) -> ByteArray:
        encoded = super().decode(encoded)
        blocks = np.empty((len(encoded), self.block_bytes), np.uint8)
        with np.errstate(all="ignore"):
            for some in self._iterate_chunks(len(encoded)):
                blocks[some] = self._decode_chunk(encoded[some])
        return blocks

    def _iterate_chunks(self, num_blocks: int) -> Iterator[slice]:
        step = max(1, self.chunk_elements // self.axes.num_elements)
        return (slice(start, start + step) for start in range(0, num_blocks, step))

    @abstractmethod
    def _encode_chunk(self, blocks: ByteArray, encoded: ByteArray) -> None:
        """Encode (n, block_bytes) into (n, encoded_bytes)."""

    @abstractmethod
    def _decode_chunk(self, encoded: ByteArray) -> ByteArray:
        """Decode (n, encoded_bytes) to (n, block_bytes)."""


def read_axes(blocks: BlockStorage | BlockLayout) -> BlockAxes:
    """Parse the axes from a block format.

    Raises:
        InvalidArgumentError: the format names no axes, as for a state (`BlockStorage.wrap_state`); or the
            elements are not 16- or 32-bit floats.
    """
    dtype, *listed = blocks.block_format.split()
    named: dict[str, int] = {}
    for word in listed:
        letter, equals, size = word.partition("=")
        if equals and letter in LETTERS and letter not in named and size.isdecimal():
            named[letter] = int(size)
    if len(named) < len(listed) or dtype not in DTYPE_BYTES:
        raise InvalidArgumentError(
            f"blocks of {blocks.block_format!r} have no axes of tokens, heads and elements; only the format "
            "raw supports them"
        )
    if dtype not in FLOATS:
        raise InvalidArgumentError(
            f"elements of {dtype} cannot be compressed; supported are {', '.join(FLOATS)}. The format raw "
            "supports any element type"
        )
    missing = "".join(letter for letter in LETTERS if letter not in named)
    axes = BlockAxes(dtype, missing + "".join(named), (1,) * len(missing) + tuple(named.values()))
    if axes.block_bytes != blocks.block_bytes:
        raise InvalidArgumentError(
            f"blocks of {blocks.block_format!r} have {axes.block_bytes} bytes, not {blocks.block_bytes}"
        )
    return axes
