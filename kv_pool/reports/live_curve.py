"""`LiveCurveReport`: the hit rates of a running pool at other capacities, with their errors."""

from collections.abc import Sequence
from itertools import accumulate
from math import sqrt

import msgspec

from kv_pool.core.arguments import check_number
from kv_pool.core.live_curve import MAX_MULTIPLE, NUM_REPLICAS, NUM_STEPS, ROW, STEPS_PER_CAPACITY, LiveCurve
from kv_pool.errors import InvalidArgumentError

MULTIPLES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
MIN_SAMPLED = 100
_SLOPE_STEPS = 4


class LiveCurvePoint(msgspec.Struct, frozen=True):
    """The hit rates at one capacity.

    Attributes:
        multiple: of the pool's capacity.
        num_blocks: the capacity, without the null block.
        block_hit_rate, token_hit_rate: the measured rate, plus the estimated change from the pool's capacity.
        block_rate_error, token_rate_error: the standard error of that change.
    """

    multiple: float
    num_blocks: int
    block_hit_rate: float
    token_hit_rate: float
    block_rate_error: float
    token_rate_error: float


class LiveCurveReport(msgspec.Struct, frozen=True):
    """The hit rates of a pool over its capacity, for recent traffic, with LRU.

    Attributes:
        capacity: blocks of the pool, without the null block.
        sample_rate: share of the blocks that is in the sample.
        looked_up_blocks: number of look-ups behind the rates, earlier ones counted in part.
        half_life_blocks: number of look-ups after which a look-up counts half.
        half_life_seconds: the time of a half-life at the present rate of look-ups; None before the first one.
        block_hit_rate, token_hit_rate: the pool's own hits, measured, over the same look-ups.
        estimated_block_hit_rate, estimated_error: the same by the sample alone, with its standard error.
        points: by capacity; empty until the sample has 100 look-ups.
    """

    capacity: int
    sample_rate: float
    looked_up_blocks: float
    half_life_blocks: int
    half_life_seconds: float | None
    block_hit_rate: float
    token_hit_rate: float
    estimated_block_hit_rate: float
    estimated_error: float
    points: list[LiveCurvePoint]

    def get_point(self, multiple: float) -> LiveCurvePoint | None:
        """Return the point of this multiple of the capacity, or None."""
        return next((point for point in self.points if point.multiple == multiple), None)


def read_live_curve(curve: LiveCurve, multiples: Sequence[float] = MULTIPLES) -> LiveCurveReport:
    """Return the curve of a pool's recent traffic, from `BlockPool.live_curve`.

    Args:
        multiples: of the pool's capacity, 0 to 4.
    Raises:
        InvalidArgumentError: a multiple is out of range.

    The caller keeps other threads away from the pool meanwhile. O(multiples), about 1 ms.
    """
    for position, multiple in enumerate(multiples):
        check_number(f"multiples[{position}]", multiple)
        if not 0 <= multiple <= MAX_MULTIPLE:
            raise InvalidArgumentError(
                f"multiples[{position}] is {multiple}; a live curve covers 0 to {MAX_MULTIPLE} capacities"
            )
    looked_up = curve.looked_up_blocks
    measured = curve.hit_blocks / looked_up if looked_up else 0.0
    tokens = curve.looked_up_tokens
    measured_tokens = curve.hit_tokens / tokens if tokens else 0.0
    blocks_to_tokens = curve.block_size * looked_up / tokens if tokens else 0.0
    estimates = _Estimates(curve)
    points = []
    for multiple in multiples if estimates.num_sampled >= MIN_SAMPLED * curve.weight else ():
        change = estimates.estimate_change(multiple)
        error = estimates.estimate_change_error(multiple)
        points.append(
            LiveCurvePoint(
                multiple=multiple,
                num_blocks=round(multiple * curve.capacity),
                block_hit_rate=_limit(measured + change),
                token_hit_rate=_limit(measured_tokens + change * blocks_to_tokens),
                block_rate_error=error,
                token_rate_error=error * blocks_to_tokens,
            )
        )
    estimated, estimated_error = estimates.estimate_here()
    return LiveCurveReport(
        capacity=curve.capacity,
        sample_rate=curve.rate,
        looked_up_blocks=looked_up / curve.weight,
        half_life_blocks=curve.half_life,
        half_life_seconds=curve.measure_half_life(),
        block_hit_rate=measured,
        token_hit_rate=measured_tokens,
        estimated_block_hit_rate=estimated,
        estimated_error=estimated_error,
        points=points,
    )


class _Estimates:
    """Changes of the block hit rate, from the counts of a sample.

    The change from capacity C to D is the share of the look-ups between both in the stack. The sample has
    `rate` of all look-ups, whose number is known, so the blocks that happen to be in it weigh less than in a
    ratio of its own look-ups (the correction "SHARDS-adj" of the paper on SHARDS).

    Errors have two parts. The look-ups in the sample: by the jackknife over disjoint parts of it. The
    distances: the number of sampled blocks among N is binomial, which shifts the curve at that capacity; the
    shift is assumed to last, so this part is an upper bound where traffic changes the stack several times.
    """

    def __init__(self, curve: LiveCurve) -> None:
        self._expected = curve.looked_up_blocks * curve.rate
        self._rest = 1 - curve.rate  # correction for the finite population: 0 if all blocks are sampled
        self._variance_per_capacity = self._rest / (curve.rate * max(1, curve.capacity))
        rows = [curve.counts[replica * ROW : (replica + 1) * ROW] for replica in range(NUM_REPLICAS)]
        self._rows = [list(accumulate(row)) for row in rows]
        self._sum = [sum(column) for column in zip(*self._rows, strict=True)]
        self.num_sampled = self._sum[-1]

    def estimate_change(self, multiple: float) -> float:
        """Return the change of the hit rate from the pool's capacity to a multiple of it."""
        return self._get_change(self._sum, multiple) / self._expected if self._expected else 0.0

    def estimate_change_error(self, multiple: float) -> float:
        """Return the standard error of this change."""
        if not self._expected or multiple == 1:
            return 0.0
        by_sample = self._get_jackknife_variance([self._get_change(row, multiple) for row in self._rows])
        here, there = self._get_slope(1), self._get_slope(multiple)
        low, low_slope = (1.0, here) if multiple > 1 else (multiple, there)
        high_slope = there if multiple > 1 else here
        by_distance = (high_slope - low_slope) ** 2 * low + high_slope**2 * abs(multiple - 1)
        return sqrt(by_sample + by_distance * self._variance_per_capacity)

    def estimate_here(self) -> tuple[float, float]:
        """Return the hit rate at the pool's capacity by the sample alone, and its standard error."""
        if not self._expected:
            return 0.0, 0.0
        misses = [row[-1] - row[STEPS_PER_CAPACITY] for row in self._rows]
        by_distance = self._get_slope(1) ** 2 * self._variance_per_capacity
        error = sqrt(self._get_jackknife_variance(misses) + by_distance)
        return _limit(1 - sum(misses) / self._expected), error

    def _get_change(self, row: list[float], multiple: float) -> float:
        return self._interpolate(row, multiple) - row[STEPS_PER_CAPACITY]

    def _interpolate(self, row: list[float], multiple: float) -> float:
        position = multiple * STEPS_PER_CAPACITY
        step = min(NUM_STEPS - 1, int(position))
        return row[step] + (position - step) * (row[step + 1] - row[step])

    def _get_slope(self, multiple: float) -> float:
        """Return the slope of the hit rate over the multiple of the capacity."""
        width = _SLOPE_STEPS / STEPS_PER_CAPACITY
        low, high = max(0.0, multiple - width), min(float(MAX_MULTIPLE), multiple + width)
        difference = self._interpolate(self._sum, high) - self._interpolate(self._sum, low)
        return difference / (high - low) / self._expected

    def _get_jackknife_variance(self, values: list[float]) -> float:
        """Return the variance of the sum of the replicas' values, as a share of the look-ups."""
        mean = sum(values) / NUM_REPLICAS
        squares = sum((value - mean) ** 2 for value in values)
        return NUM_REPLICAS / (NUM_REPLICAS - 1) * squares / self._expected**2 * self._rest


def _limit(share: float) -> float:
    return min(1.0, max(0.0, share))
