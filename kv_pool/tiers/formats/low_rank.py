"""The experimental format low_rank: each head's tokens as a product of two thin matrices."""

from __future__ import annotations

import numpy as np

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
        self.rank = max(1, int(size_ratio * tokens * head_size / (tokens + head_size)))
        if (tokens + head_size) * self.rank >= tokens * head_size:
            raise InvalidArgumentError(
                f"a matrix of {tokens} tokens and {head_size} elements takes {tokens * head_size} elements, "
                f"and two factors of rank {self.rank} take {(tokens + head_size) * self.rank}"
            )
        num_elements = axes.num_elements // (tokens * head_size) * (tokens + head_size) * self.rank
        super().__init__(f"low_rank:{size_ratio:g}", axes, num_elements * DTYPE_BYTES[axes.dtype])
        self._order = (0, *(1 + axes.letters.index(letter) for letter in "L2HND"))

    def _encode_chunk(self, blocks: ByteArray, encoded: ByteArray) -> None:
        """Store (m, N, rank) and (m, rank, D) of m matrices; each factor takes the roots of the values."""
        matrices = self.axes.to_floats(blocks).transpose(self._order).astype(np.float64)
        is_finite = np.isfinite(matrices).all((-2, -1), keepdims=True)
        left, values, right = np.linalg.svd(np.where(is_finite, matrices, 0), full_matrices=False)
        roots = np.where(is_finite, np.sqrt(values[..., None, : self.rank]), np.nan)
        left, right = left[..., : self.rank] * roots, right[..., : self.rank, :] * roots.swapaxes(-2, -1)
        factors = np.concatenate([left.reshape(len(blocks), -1), right.reshape(len(blocks), -1)], axis=1)
        encoded[:] = from_floats(factors.astype(np.float32), self.axes.dtype)

    def _decode_chunk(self, encoded: ByteArray) -> ByteArray:
        factors = to_floats(encoded, self.axes.dtype).astype(np.float64)
        outer = (len(encoded), *(self.axes.get_size(letter) for letter in "L2H"))
        tokens, head_size = self.axes.get_size("N"), self.axes.get_size("D")
        split = factors.shape[1] // (tokens + head_size) * tokens
        left = factors[:, :split].reshape(*outer, tokens, self.rank)
        right = factors[:, split:].reshape(*outer, self.rank, head_size)
        limit = FLOATS[self.axes.dtype]
        matrices = np.clip(left @ right, -limit, limit).astype(np.float32)
        return self.axes.from_floats(matrices.transpose(np.argsort(self._order)))
