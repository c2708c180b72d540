"""`RandomStream`: reproducible random numbers, equal on every platform and Python version."""

import random
from math import sqrt

from kv_pool.replay.workloads.portable_math import portable_log


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
