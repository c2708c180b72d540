"""`RandomStream`, `ZipfSampler`: reproducible random numbers, equal on every platform and Python version.

Logarithms and exponentials of `math` may differ in the last bit between C libraries, which would change a
generated trace. Everything here uses IEEE 754 additions, multiplications, divisions and square roots only,
and gives the same bits on every platform; `portable_log` and `portable_exp` are within 4 units in the last
place of the exact result.
"""

import random
from array import array
from bisect import bisect_right
from math import frexp, ldexp, sqrt

from kv_pool.errors import InvalidArgumentError

MAX_ITEMS = 10_000_000
"""Maximum number of items, 80 MB of cumulated weights."""

LN_2 = 0.6931471805599453
_LN_2_HIGH = 0.693147180369123816490  # 33 bits, so that its product with an exponent is exact
_LN_2_LOW = 1.90821492927058770002e-10
_SQRT_HALF = 0.7071067811865476
_LOG_TERMS = tuple(1.0 / (2 * index + 1) for index in range(12, -1, -1))
# Coefficients of Lanczos' approximation with g = 7 and 9 terms.
_LANCZOS = (
    0.99999999999980993,
    676.5203681218851,
    -1259.1392167224028,
    771.32342877765313,
    -176.61502916214059,
    12.507343278686905,
    -0.13857109526572012,
    9.9843695780195716e-6,
    1.5056327351493116e-7,
)
_SQRT_2_PI = 2.5066282746310002
_EXP_DIVISORS = tuple(float(index) for index in range(14, 0, -1))


def portable_log(value: float) -> float:
    """Return the natural logarithm of a positive finite number."""
    fraction, exponent = frexp(value)
    if fraction < _SQRT_HALF:
        fraction *= 2.0
        exponent -= 1
    ratio = (fraction - 1.0) / (fraction + 1.0)
    square = ratio * ratio
    total = 0.0
    for term in _LOG_TERMS:
        total = total * square + term
    return exponent * _LN_2_HIGH + (2.0 * ratio * total + exponent * _LN_2_LOW)


def portable_exp(value: float) -> float:
    """Return e to the power of `value`; 0.0 below -745, and OverflowError above 709."""
    if value < -745.0:
        return 0.0
    exponent = int(value / LN_2 + (0.5 if value >= 0 else -0.5))
    rest = (value - exponent * _LN_2_HIGH) - exponent * _LN_2_LOW
    total = 1.0
    for divisor in _EXP_DIVISORS:
        total = total * rest / divisor + 1.0
    return ldexp(total, exponent)


def portable_gamma(value: float) -> float:
    """Return the gamma function of a number of 1 to 100, within a relative error of 1e-13 (Lanczos)."""
    value -= 1.0
    total = _LANCZOS[0]
    for index, term in enumerate(_LANCZOS[1:], 1):
        total += term / (value + index)
    base = value + 7.5
    return _SQRT_2_PI * portable_exp((value + 0.5) * portable_log(base) - base) * total


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
