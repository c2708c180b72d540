"""Rate limit for log messages about frequent conditions."""


def is_worth_logging(count: int) -> bool:
    """Return True for the 1st, 2nd, 4th, 8th occurrence, and so on."""
    return count & (count - 1) == 0
