"""`Resampler`: confidence intervals by resampling the conversations of a trace (the bootstrap)."""

import numpy as np
from numpy.typing import NDArray

_CONFIDENCE = 0.95
_SAMPLES_AT_ONCE = 32


class Resampler:
    """Draws samples of as many units as a trace has, with replacement, and sums their counts.

    All counts of a comparison are summed over the same samples, so that differences between policies are
    paired: what both have in common does not widen their intervals. Replays are not repeated. An interval
    therefore covers the choice of conversations, and not that other conversations would leave other blocks
    in the cache (Efron and Tibshirani, "An introduction to the bootstrap", 1993: the percentile interval).

    Args:
        num_units: number of sessions or roots.
        num_samples: number of samples.
        seed: seed of the samples.
    """

    def __init__(self, num_units: int, num_samples: int, seed: int) -> None:
        self._num_units = num_units
        self._num_samples = num_samples
        self._seed = seed

    def sum_up(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the sums of each sample. `counts` has one row per unit, the result one row per sample."""
        random = np.random.default_rng(self._seed)
        num_units = self._num_units
        sums = np.empty((self._num_samples, counts.shape[1]))
        numbers = counts.astype(np.float64)
        for first in range(0, self._num_samples, _SAMPLES_AT_ONCE):
            end = min(first + _SAMPLES_AT_ONCE, self._num_samples)
            times = [
                np.bincount(random.integers(num_units, size=num_units), minlength=num_units)
                for _ in range(first, end)
            ]
            sums[first:end] = np.array(times, dtype=np.float64) @ numbers
        return sums


def find_interval(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the 2.5th and 97.5th percentile; None if there are no values, or one is not a number."""
    if not len(values) or not np.isfinite(values).all():
        return None
    low, high = np.quantile(values, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    return float(low), float(high)


def sum_by_unit(counts: NDArray[np.int64], unit_of: NDArray[np.int64], num_units: int) -> NDArray[np.int64]:
    """Return the sums over the requests of each unit. `counts` has one row per request."""
    sums = np.zeros((num_units, counts.shape[1]), dtype=np.int64)
    np.add.at(sums, unit_of, counts)
    return sums
