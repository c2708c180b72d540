"""`BlockFormat`: the interface of block encodings; `RawFormat`: the identity."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kv_pool.errors import InvalidArgumentError

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]


class HasBlockBytes(Protocol):
    """The properties of blocks that a format needs; `BlockStorage` and `BlockLayout` have them."""

    @property
    def block_format(self) -> str:
        """Element type and axis sizes, in the order of a block's bytes."""

    @property
    def block_bytes(self) -> int:
        """Size of a block in bytes, all layers."""


class BlockFormat(Protocol):
    """An encoding of blocks: converts raw block bytes to stored bytes and back.

    Each block is encoded separately and can be decoded alone. A lossy format is not idempotent: encoding a
    decoded block again adds a further error, so do not pass blocks through a lossy format twice.

    Attributes:
        name: the argument of `make_format` for the same format; tiers store it.
        encoded_bytes: size of an encoded block, the same for every block.
    """

    @property
    def name(self) -> str: ...

    @property
    def encoded_bytes(self) -> int: ...

    def encode(self, blocks: ByteArray) -> ByteArray:
        """Encode (n, block_bytes) uint8 to (n, encoded_bytes) uint8. Accepts NaN and infinities.

        Raises:
            InvalidArgumentError: the array has another shape or type.
        """

    def decode(self, encoded: ByteArray) -> ByteArray:
        """Decode (n, encoded_bytes) uint8 to (n, block_bytes) uint8, within the format's documented error.

        Bytes that `encode` did not produce decode to arbitrary numbers; verify a checksum first.

        Raises:
            InvalidArgumentError: the array has another shape or type.
        """


class RawFormat:
    """The identity encoding. `encode` and `decode` return their argument."""

    name = "raw"

    def __init__(self, blocks: HasBlockBytes) -> None:
        self.encoded_bytes = blocks.block_bytes

    def encode(self, blocks: ByteArray) -> ByteArray:
        return check_rows(blocks, self.encoded_bytes)

    def decode(self, encoded: ByteArray) -> ByteArray:
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
