"""`read_clock`: the default clock of a pool. Nothing else in the core reads a clock."""

from time import monotonic


def read_clock() -> float:
    """Return the system's monotonic clock, in seconds."""
    return monotonic()
