"""`Distribution`, `RandomStream`: random lengths, counts and times, equal on every platform and Python.

Logarithms and exponentials of `math` may differ in the last bit between C libraries, which would change a
generated trace. Everything here uses IEEE 754 additions, multiplications, divisions and square roots only,
and gives the same bits on every platform; `portable_log` and `portable_exp` are within 4 units in the last
place of the exact result.
"""

import random
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
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
        weights = (portable_exp(-exponent * portable_log(rank + 1.0)) for rank in range(num_items))
        self._cumulated = array("d", accumulate(weights))

    def take_rank(self, stream: RandomStream) -> int:
        """Return the rank of the next item."""
        if self.num_items == 1:
            return 0
        at = bisect_right(self._cumulated, stream.take_uniform() * self._cumulated[-1])
        return min(at, self.num_items - 1)


FORMAT = "fixed:VALUE, uniform:LOW:HIGH, exponential:MEAN, lognormal:MEDIAN:SIGMA or geometric:MEAN"
"""The notation of distributions.

    fixed         always VALUE
    uniform       LOW <= x < HIGH
    exponential   mean MEAN
    lognormal     the logarithm is normal with mean log(MEDIAN) and standard deviation SIGMA
    geometric     1, 2, 3, ... with mean MEAN, 1 or more
"""

_NUM_PARAMETERS = {"fixed": 1, "uniform": 2, "exponential": 1, "lognormal": 2, "geometric": 1}
_MAX_PARAMETER = 1e12
_MAX_SIGMA = 10.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of numbers that are 0 or more.

    Attributes:
        kind: fixed, uniform, exponential, lognormal or geometric.
        first, second: its parameters, in the order of the notation; 0 if it has no second.

    Raises:
        InvalidArgumentError: the kind is unknown, or a parameter is out of range.
    """

    kind: str
    first: float
    second: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _NUM_PARAMETERS:
            raise InvalidArgumentError(f"unknown distribution {self.kind!r}; write {FORMAT}")
        for value in (self.first, self.second):
            if not 0 <= value <= _MAX_PARAMETER:
                raise InvalidArgumentError(f"{self}: {value} is not in 0..{_MAX_PARAMETER:g}")
        if self.kind == "uniform" and self.second < self.first:
            raise InvalidArgumentError(f"{self}: HIGH is below LOW")
        if self.kind == "lognormal" and (self.first == 0 or self.second > _MAX_SIGMA):
            raise InvalidArgumentError(f"{self}: MEDIAN must be above 0, and SIGMA at most {_MAX_SIGMA:g}")
        if self.kind == "geometric" and self.first < 1:
            raise InvalidArgumentError(f"{self}: MEAN must be 1 or more")

    @classmethod
    def parse(cls, text: str) -> "Distribution":
        """Return the distribution that `text` describes; see `FORMAT`. Raises InvalidArgumentError."""
        kind, *parameters = text.split(":")
        if len(parameters) != _NUM_PARAMETERS.get(kind):
            raise InvalidArgumentError(f"{text!r} is not a distribution; write {FORMAT}")
        try:
            values = [float(one) for one in parameters]
        except ValueError:
            raise InvalidArgumentError(f"{text!r} has a parameter that is not a number") from None
        return cls(kind, *values)

    def __str__(self) -> str:
        values = (self.first, self.second)[: _NUM_PARAMETERS.get(self.kind, 2)]
        return ":".join([self.kind, *(f"{value:.12g}" for value in values)])

    def sample(self, stream: RandomStream) -> float:
        """Return one number of the distribution, 0 or more."""
        if self.kind == "fixed":
            return self.first
        if self.kind == "uniform":
            return self.first + (self.second - self.first) * stream.take_uniform()
        if self.kind == "exponential":
            return self.first * stream.take_exponential()
        if self.kind == "lognormal":
            return self.first * portable_exp(self.second * stream.take_normal())
        if self.first == 1.0:
            return 1.0
        return 1.0 + int(stream.take_exponential() / -portable_log(1.0 - 1.0 / self.first))

    def sample_count(self, stream: RandomStream, least: int = 1) -> int:
        """Return one number of the distribution, rounded to an integer, and `least` or more."""
        return max(least, int(self.sample(stream) + 0.5))
