"""Counts of requests as compressed bytes, for transfer between processes and for files."""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_pool.errors import TraceError


def pack(counts: Sequence[int] | Sequence[tuple[int, int]]) -> bytes:
    """Compress counts, or pairs of counts."""
    return zlib.compress(np.asarray(counts, dtype="<i8").tobytes(), 6)


def unpack(packed: bytes, num_requests: int, num_columns: int = 1) -> NDArray[np.int64]:
    """Return packed counts as an array of shape (num_requests, num_columns).

    Raises:
        TraceError: the bytes do not have these counts.
    """
    try:
        counts = np.frombuffer(zlib.decompress(packed), dtype="<i8")
        return counts.reshape(num_requests, num_columns).astype(np.int64, copy=False)
    except (zlib.error, ValueError) as error:
        raise TraceError(
            f"the counts of {num_requests} requests are damaged ({error}); delete the file of finished runs"
        ) from error
