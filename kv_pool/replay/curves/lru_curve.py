"""`LruCurve`: the hits of LRU at any capacity, from one pass over the requests."""

import numpy as np

from kv_pool.replay.curves.lru_stack import LruStack
from kv_pool.replay.curves.reuse import Reuse, admit


class LruCurve:
    """The hits of LRU at any capacity.

    One pass counts all capacities that refuse no request. Smaller capacities need a pass over the requests
    that fit, for each set of such requests; passes are kept.

    Args:
        reuse: the pieces of a trace.
        rate: share of the trace's sessions that `reuse` has. Below 1, stack distances are estimates: the
            number of blocks of other requests is divided by the rate (Waldspurger et al., "Efficient MRC
            construction with SHARDS", FAST, 2015), that of the prompt's own blocks is not.

    Cost: O(pieces * log requests) per pass, whatever the number of blocks; O(log capacities) per count.
    """

    def __init__(self, reuse: Reuse, rate: float = 1.0) -> None:
        self._reuse = reuse
        self._rate = rate
        self._sizes = np.unique(np.array(reuse.num_blocks))
        self._passes: dict[int, _StepFunctions] = {}

    def count_hits(self, capacity: int) -> tuple[int, int]:
        """Return the block hits and token hits of a pool of `capacity` usable blocks.

        They equal those of a replay with the instant clock if `rate` is 1.
        """
        return self._pass_for(capacity).count(capacity)

    def find_least_full_capacity(self) -> int:
        """Return the least capacity that refuses no request and has all hits of an infinite cache."""
        largest = self._reuse.largest_request
        return max(largest, self._pass_for(largest).last_bend)

    def _pass_for(self, capacity: int) -> "_StepFunctions":
        index = int(np.searchsorted(self._sizes, capacity, "right")) - 1
        admitted = int(self._sizes[index]) if index >= 0 else 0
        if admitted not in self._passes:
            self._passes[admitted] = _StepFunctions(admit(self._reuse, admitted), self._rate)
        return self._passes[admitted]


class _StepFunctions:
    """The counts of one pass as functions of the capacity."""

    def __init__(self, reuse: Reuse, rate: float) -> None:
        stack = LruStack(len(reuse), reuse.block_size, 1 / rate)
        first, owner, end = reuse.first_piece.tolist(), reuse.owner.tolist(), reuse.end.tolist()
        access = stack.access
        for number in range(len(reuse)):
            begin, stop = first[number], first[number + 1]
            access(
                number,
                reuse.num_cacheable[number],
                reuse.num_blocks[number],
                reuse.max_hit[number],
                reuse.input_length[number],
                owner[begin:stop],
                end[begin:stop],
            )
        self._block_size = reuse.block_size
        self._bends, changes = _sort(stack.slopes)
        self.last_bend = int(self._bends[-1]) - 1 if len(changes) else 1
        self._slopes = np.cumsum(changes)
        self._offsets = np.cumsum(changes * (self._bends - 1))
        self._steps, missing = _sort(stack.missing_tokens)
        self._missing = np.cumsum(missing)

    def count(self, capacity: int) -> tuple[int, int]:
        bend = int(np.searchsorted(self._bends, capacity, "right")) - 1
        step = int(np.searchsorted(self._steps, capacity, "right")) - 1
        num_blocks = int(capacity * self._slopes[bend] - self._offsets[bend]) if bend >= 0 else 0
        return num_blocks, num_blocks * self._block_size - (int(self._missing[step]) if step >= 0 else 0)


def _sort(by_capacity: dict[int, int]) -> tuple["np.ndarray", "np.ndarray"]:
    items = np.array(sorted(by_capacity.items()), dtype=np.int64).reshape(-1, 2)
    return items[:, 0], items[:, 1]
