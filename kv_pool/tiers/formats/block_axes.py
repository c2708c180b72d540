"""`BlockAxes`: where layer, K or V, token, head and element are in the bytes of a block."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kv_pool.errors import InvalidArgumentError
from kv_pool.storage.dtypes import DTYPE_BYTES
from kv_pool.tiers.formats.block_format import ByteArray, FloatArray, HasBlockBytes
from kv_pool.tiers.formats.floats import FLOATS, from_floats, to_floats

LETTERS = "L2NHD"


@dataclass(frozen=True)
class BlockAxes:
    """The axes of a block, outermost first, each of L 2 N H D once.

    Those that a block format leaves out have one step and are listed in front. A latent cache (MLA) has no
    axis of K and V: its `2` has one step, too.
    """

    dtype: str
    letters: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Of one block."""
        return prod(self.shape)

    @property
    def block_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def kv_place(self) -> int:
        """Which axis is K and V, counted behind that of the blocks."""
        return 1 + self.letters.index("2")

    @property
    def has_values(self) -> bool:
        """Does it hold K and V, or one latent vector a token?"""
        return self.get_size("2") == 2

    def get_size(self, letter: str) -> int:
        """Steps of an axis."""
        return self.shape[self.letters.index(letter)]

    def get_places(self, letters: str) -> tuple[int, ...]:
        """These axes of an array of blocks whose axis of K and V has been taken away."""
        rest = self.letters.replace("2", "")
        return tuple(1 + rest.index(letter) for letter in letters)

    def to_floats(self, blocks: ByteArray) -> FloatArray:
        """(n, block_bytes) to (n, *shape), a copy."""
        return to_floats(blocks, self.dtype).reshape(len(blocks), *self.shape)

    def from_floats(self, values: FloatArray) -> ByteArray:
        """(n, *shape) to (n, block_bytes), rounded to the nearest number there is."""
        return from_floats(values.reshape(len(values), self.num_elements), self.dtype)


def read_axes(blocks: HasBlockBytes) -> BlockAxes:
    """The axes that a block format names.

    Raises:
        InvalidArgumentError: it names none, as that of a state (`BlockStorage.wrap_state`); or elements that
            are no 16- or 32-bit floats.
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
            "raw keeps them"
        )
    if dtype not in FLOATS:
        raise InvalidArgumentError(
            f"elements of {dtype} are not written in fewer bytes; those of {', '.join(FLOATS)} are. The "
            "format raw keeps any"
        )
    missing = "".join(letter for letter in LETTERS if letter not in named)
    axes = BlockAxes(dtype, missing + "".join(named), (1,) * len(missing) + tuple(named.values()))
    if axes.block_bytes != blocks.block_bytes:
        raise InvalidArgumentError(
            f"blocks of {blocks.block_format!r} have {axes.block_bytes} bytes, not {blocks.block_bytes}"
        )
    return axes
