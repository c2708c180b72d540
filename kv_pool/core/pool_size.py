"""Check that a pool of a given number of blocks fits into this machine's memory."""

import os
import re

from kv_pool.core.block import COMPILED
from kv_pool.errors import PoolTooLargeError

_MEMINFO = "/proc/meminfo"
_CONTAINER_LIMIT = "/sys/fs/cgroup/memory.max"

BYTES_PER_BLOCK = 120 if COMPILED else 184
"""Measured for a new `BlockPool`; cached blocks and blocks in use take more."""


def check_fits_memory(num_blocks: int) -> None:
    """Raise PoolTooLargeError if the records of `num_blocks` blocks need more memory than is available."""
    needed = num_blocks * BYTES_PER_BLOCK
    available = count_available_bytes()
    if available is not None and needed > available:
        needed_gb, available_gb = needed / 1e9, available / 1e9
        raise PoolTooLargeError(
            f"a pool of {num_blocks:,} blocks needs {needed_gb:,.1f} GB of memory for its own "
            f"records, {BYTES_PER_BLOCK} bytes per block; {available_gb:,.1f} GB are available. "
            f"Ask for fewer blocks, or for larger ones"
        )


def count_available_bytes() -> int | None:
    """Return how many bytes this container can allocate without swapping, or None if unknown."""
    known = [size for size in (_read_available(), _read_limit()) if size is not None]
    return min(known, default=None)


def _read_available() -> int | None:
    try:
        with open(_MEMINFO) as file:
            found = re.search(r"^MemAvailable:\s*(\d+) kB", file.read(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _read_limit() -> int | None:
    try:
        with open(_CONTAINER_LIMIT) as file:
            return int(file.read())
    except (OSError, ValueError):  # no such file, or "max"
        return None
