"""`RandomStream`, `ZipfSampler`: reproducible random numbers, equal on every platform and Python version."""

import random
from array import array
from bisect import bisect_right
from math import sqrt

from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.workloads.portable_math import portable_exp, portable_log

MAX_ITEMS = 10_000_000
"""Maximum number of items, 80 MB of cumulated weights."""


class RandomStream:
    """A stream of random numbers that a seed determines.

    It uses only `random.Random.random`, whose sequence Python guarantees, and `portable_log`.

    Args:
        seed: any integer.
    """

    def __init__(self, seed: int) -> None:
        # Random() ignores the sign of a seed.
        self._random = random.Random(2 * seed if seed >= 0 else -2 * seed - 1).random
        self._spare: float | None = None

    def take_uniform(self) -> float:
        """Return the next number, uniform in 0 <= x < 1."""
        return self._random()

    def take_exponential(self) -> float:
        """Return the next number of an exponential distribution with mean 1."""
        return -portable_log(1.0 - self._random())

    def take_normal(self) -> float:
        """Return the next number of the standard normal distribution (polar method of Marsaglia)."""
        if self._spare is not None:
            found, self._spare = self._spare, None
            return found
        while True:
            x = 2.0 * self._random() - 1.0
            y = 2.0 * self._random() - 1.0
            square = x * x + y * y
            if 0.0 < square < 1.0:
                break
        factor = sqrt(-2.0 * portable_log(square) / square)
        self._spare = y * factor
        return x * factor


class ZipfSampler:
    """Draws ranks 0 to `num_items` - 1; rank r has a probability in proportion to (r + 1) ** -`exponent`.

    Memory is 8 bytes per item. A draw costs O(log num_items).

    Raises:
        InvalidArgumentError: `num_items` is not in 1..MAX_ITEMS, or `exponent` not in 0..10.
    """

    def __init__(self, num_items: int, exponent: float) -> None:
        if not 1 <= num_items <= MAX_ITEMS:
            raise InvalidArgumentError(f"{num_items:,} items are not in 1..{MAX_ITEMS:,}")
        if not 0 <= exponent <= 10:
            raise InvalidArgumentError(f"the Zipf exponent is {exponent}; it must be in 0..10")
        self.num_items = num_items
        self._cumulated = array("d")
        total = 0.0
        for rank in range(num_items):
            total += portable_exp(-exponent * portable_log(rank + 1.0))
            self._cumulated.append(total)

    def take_rank(self, stream: RandomStream) -> int:
        """Return the rank of the next item."""
        if self.num_items == 1:
            return 0
        at = bisect_right(self._cumulated, stream.take_uniform() * self._cumulated[-1])
        return min(at, self.num_items - 1)
