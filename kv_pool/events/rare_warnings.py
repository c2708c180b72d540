"""When to log what may happen a million times."""


def is_worth_logging(count: int) -> bool:
    """Return True the 1st, 2nd, 4th, 8th time, and so on."""
    return count & (count - 1) == 0
