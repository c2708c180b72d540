"""Numbers as people write them: counts such as `10k`, lists and ranges, sizes such as `40GiB`, and rates."""

import re
from collections.abc import Callable
from fractions import Fraction

from kv_pool.errors import InvalidArgumentError

RANGE_FORMAT = "1000,3k,10k, or FIRST:LAST:logN or :linN for N values in equal ratios or steps: 1k:100k:log20"

_MOST = 10_000

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_count(text: str) -> int:
    """Return the number of a text such as `1000`, `1_000`, `10k` or `1.5M`. Raises InvalidArgumentError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.strip().lower().replace("_", ""))
    number = float(found[1]) * _UNITS[found[2]] if found else 0.5
    if number != int(number):
        raise InvalidArgumentError(f"{text!r} is not a whole number such as 1000, 10k or 1.5M")
    return int(number)


def parse_range(text: str, parse_one: Callable[[str], int] = parse_count) -> list[int]:
    """Return the numbers of a comma-separated list of numbers and ranges, sorted and without duplicates.

    Args:
        parse_one: parses a number of the list or an end of a range.
    Raises:
        InvalidArgumentError: a part cannot be parsed; the message names it.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        if ":" not in part:
            numbers.add(parse_one(part))
            continue
        found = re.fullmatch(r"([^:]+):([^:]+):(log|lin)(\d{1,6})", part.strip().lower())
        if found is None:
            raise InvalidArgumentError(f"{part!r} is not a range; write it as {RANGE_FORMAT}")
        first, last, num_points = parse_one(found[1]), parse_one(found[2]), int(found[4])
        if not 0 < first < last or not 2 <= num_points <= _MOST:
            raise InvalidArgumentError(
                f"{part!r} is not a range: it needs 0 < FIRST < LAST and 2 to {_MOST:,} values"
            )
        steps = [position / (num_points - 1) for position in range(num_points)]
        if found[3] == "log":
            numbers.update(round(first * (last / first) ** step) for step in steps)
        else:
            numbers.update(round(first + (last - first) * step) for step in steps)
    return sorted(numbers)


def parse_memory(text: str) -> int:
    """Return the bytes of a size such as `40GiB`, `40GB` or `1000000`. Raises InvalidArgumentError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if found is None:
        raise InvalidArgumentError(f"{text!r} is not a size; write it as 40GiB, 512MiB or 40GB")
    return int(Fraction(found[1]) * _UNITS[found[2] or ""])


def parse_rate(text: str) -> float:
    """Return the bytes per second of a rate such as `100MB/s` or `1GiB/s`. Raises InvalidArgumentError."""
    size = text.strip().removesuffix("/s")
    try:
        rate = parse_memory(size)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{text!r} is not a rate; write it as 100MB/s or 1GiB/s") from error
    if rate < 1:
        raise InvalidArgumentError(f"the rate {text!r} is below 1 byte per second")
    return float(rate)
