"""Find out how much memory is available on this machine."""

import os
import re

_MEMINFO = "/proc/meminfo"
_CONTAINER_LIMIT = "/sys/fs/cgroup/memory.max"


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
