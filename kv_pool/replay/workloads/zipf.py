"""`ZipfSampler`: draws items whose popularity follows a power law of their rank."""

from array import array
from bisect import bisect_right

from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.workloads.portable_math import portable_exp, portable_log
from kv_pool.replay.workloads.random_stream import RandomStream

MAX_ITEMS = 10_000_000
"""Maximum number of items, 80 MB of cumulated weights."""


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

    def measure_share(self, num_first: int) -> float:
        """Return the probability that an item is among the `num_first` most popular ones."""
        if num_first < 1:
            return 0.0
        return self._cumulated[min(num_first, self.num_items) - 1] / self._cumulated[-1]
