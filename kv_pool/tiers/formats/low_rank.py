"""The experimental format low_rank: each head's tokens as a product of two thin matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kv_pool.errors import InvalidArgumentError
from kv_pool.storage.tensors import DTYPE_BYTES
from kv_pool.tiers.formats.block_format import (
    FLOATS,
    BlockAxes,
    ByteArray,
    ChunkedFormat,
    from_floats,
    to_floats,
)

DEFAULT_SIZE_RATIO = 0.5


class LowRankFormat(ChunkedFormat):
    """A truncated singular value decomposition of each (tokens, head_size) matrix, per layer, K/V and head.

        (N, D)  is about  (N, rank) @ (rank, D),   in (N + D) * rank elements instead of N * D

    Args:
        size_ratio: maximum ratio of encoded to raw bytes. The rank is the largest that fits, at least 1.
    Raises:
        InvalidArgumentError: the ratio is not in (0, 1], or the block has too few tokens or elements for any
            rank to save bytes.

    Error: the omitted singular values, which is the minimum for a matrix of this rank, plus the rounding of
    both factors to the element type. A matrix of 16 tokens has rank at most 16; at half the bytes and head
    size 64 the format keeps rank 6, so a matrix without low-rank structure loses most of its content. A
    matrix with a NaN or an infinity decodes to NaN in every element.
    """

    chunk_elements = 1 << 20

    def __init__(self, axes: BlockAxes, size_ratio: float = DEFAULT_SIZE_RATIO) -> None:
        if not 0 < size_ratio <= 1:
            raise InvalidArgumentError(f"size_ratio is {size_ratio}; it must be above 0 and at most 1")
        tokens, head_size = axes.get_size("N"), axes.get_size("D")
        super().__init__(f"low_rank:{size_ratio:g}", axes)
        self.rank = max(1, int(size_ratio * tokens * head_size / (tokens + head_size)))
        if (tokens + head_size) * self.rank >= tokens * head_size:
            raise InvalidArgumentError(
                f"a matrix of {tokens} tokens and {head_size} elements takes {tokens * head_size} elements, "
                f"and two factors of rank {self.rank} take {(tokens + head_size) * self.rank}"
            )
        places = [axes.letters.index(letter) for letter in "L2HND"]
        self._order = (0, *(1 + place for place in places))
        self._ordered_shape = tuple(axes.shape[place] for place in places)
        self._num_matrices = axes.num_elements // (tokens * head_size)
        self._left, self._right = (tokens, self.rank), (self.rank, head_size)
        num_elements = self._num_matrices * (tokens + head_size) * self.rank
        self.encoded_bytes = num_elements * DTYPE_BYTES[axes.dtype]

    def _encode_chunk(self, blocks: ByteArray, encoded: ByteArray) -> None:
        matrices = self.axes.to_floats(blocks).transpose(self._order)
        left, right = self._factorise(matrices.reshape(-1, self._left[0], self._right[1]))
        shape = (len(blocks), -1)
        factors = np.concatenate([left.reshape(shape), right.reshape(shape)], axis=1)
        encoded[:] = from_floats(factors, self.axes.dtype)

    def _decode_chunk(self, encoded: ByteArray) -> ByteArray:
        factors = to_floats(encoded, self.axes.dtype).astype(np.float64)
        split = self._num_matrices * self._left[0] * self.rank
        left = factors[:, :split].reshape(-1, *self._left)
        right = factors[:, split:].reshape(-1, *self._right)
        limit = FLOATS[self.axes.dtype]
        matrices = np.clip(left @ right, -limit, limit).astype(np.float32)
        ordered = matrices.reshape(-1, *self._ordered_shape)
        return self.axes.from_floats(ordered.transpose(np.argsort(self._order)))

    def _factorise(self, matrices: npt.NDArray[np.float32]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Split (m, N, D) into (m, N, rank) and (m, rank, D); each takes the root of the singular values."""
        is_finite = np.isfinite(matrices).all((1, 2), keepdims=True)
        finite = np.where(is_finite, matrices, 0)
        # Without scaling, numbers near the largest would overflow.
        largest = np.abs(finite).max((1, 2), keepdims=True)
        largest = np.where(largest > 0, largest, np.float32(1))
        left, values, right = np.linalg.svd(finite / largest, full_matrices=False)
        roots = np.sqrt(values[:, : self.rank]) * np.sqrt(largest[:, 0])
        poison = np.where(is_finite, np.float32(0), np.float32(np.nan))
        return (
            left[:, :, : self.rank] * roots[:, None, :] + poison,
            right[:, : self.rank] * roots[:, :, None] + poison,
        )
