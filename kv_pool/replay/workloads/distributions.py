"""`Distribution`: a distribution of lengths, counts or times, written as text."""

from dataclasses import dataclass

from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.workloads.random_stream import RandomStream, portable_exp, portable_log

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
