"""`read_clock`: the time of pools that get no clock of their own. Nothing else in the core reads a clock."""

from time import monotonic


def read_clock() -> float:
    """Return the seconds of the system's monotonic clock."""
    return monotonic()
