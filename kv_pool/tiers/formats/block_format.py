"""`BlockFormat`: what every way to write blocks promises; `RawFormat`, the one that changes nothing."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kv_pool.errors import InvalidArgumentError

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]


class HasBlockBytes(Protocol):
    """What a format has to know of blocks; a `BlockStorage` has it, and so has a `BlockLayout`."""

    @property
    def block_format(self) -> str:
        """Element type and sizes, in the order of a block's bytes."""

    @property
    def block_bytes(self) -> int:
        """Of one block, all layers."""


class BlockFormat(Protocol):
    """From the bytes of blocks to the bytes that a tier keeps of them, and back.

    Blocks are encoded each by itself, so any of them can be decoded alone. Encoding what was decoded gives
    about the same again, not the same: do not pass blocks through a lossy format twice.

    Attributes:
        name: what `make_format` takes to make the same one again; tiers write it down.
        encoded_bytes: what each block takes, whatever is in it.
    """

    @property
    def name(self) -> str: ...

    @property
    def encoded_bytes(self) -> int: ...

    def encode(self, blocks: ByteArray) -> ByteArray:
        """(n, block_bytes) uint8 to (n, encoded_bytes) uint8. What is not finite raises nothing.

        Raises:
            InvalidArgumentError: another shape or type.
        """

    def decode(self, encoded: ByteArray) -> ByteArray:
        """(n, encoded_bytes) uint8 to (n, block_bytes) uint8, within the error that the format names.

        Raises:
            InvalidArgumentError: another shape or type. Bytes that no `encode` made give any numbers, so
                verify a checksum first.
        """


class RawFormat:
    """Blocks as they are. `encode` and `decode` give back the array that they are given."""

    name = "raw"

    def __init__(self, blocks: HasBlockBytes) -> None:
        self.encoded_bytes = blocks.block_bytes

    def encode(self, blocks: ByteArray) -> ByteArray:
        return check_rows(blocks, self.encoded_bytes)

    def decode(self, encoded: ByteArray) -> ByteArray:
        return check_rows(encoded, self.encoded_bytes)


def check_rows(rows: Any, num_bytes: int) -> ByteArray:
    """The rows in one piece of memory.

    Raises:
        InvalidArgumentError: they are not (n, num_bytes) of uint8.
    """
    array: npt.NDArray[Any] = np.asarray(rows)
    if array.ndim != 2 or array.shape[1] != num_bytes or array.dtype != np.uint8:
        raise InvalidArgumentError(
            f"blocks here are rows of {num_bytes} bytes, (n, {num_bytes}) of uint8, not {array.shape} of "
            f"{array.dtype}"
        )
    return np.ascontiguousarray(array)
