"""`LruCurve`: the hits of LRU at any capacity, from the stack distances of one pass over the requests.

The recency order of the blocks is the same in pools of all capacities (Mattson et al., "Evaluation
techniques for storage hierarchies", IBM Systems Journal, 1970): a block is cached if its rank in that order
is at most the number of cached blocks. All blocks of a request leave it together, the head as the most
recent one, so the order is a list of requests with one interval of blocks each, and a piece of a prompt has
consecutive ranks. A Fenwick tree over the requests counts the blocks above it.

Two things depend on the capacity. Both take a block of the pool from a threshold capacity on:

    a blank    the last, unhashed block of a prompt. It is reused first, so a pool has at most one blank, and
               only until a request needs a new block.
    a copy     a block that was cached but had to be computed again (`max_hit`) has two copies. A later hit
               touches the copy that was cached first; the other ages without being used. In a pool that
               had already evicted the first copy, the hit touches the second one, and none is left over.

With thresholds T above a block of rank r, the block is cached at capacity C if r + |{c in T: c <= C}| <= C.
A pool of C + 1 blocks has one block more than a pool of C: a cached one, a blank or a copy. So this holds
from one capacity on, the block's own.
"""

from bisect import bisect_left, insort
from itertools import pairwise

import numpy as np

from kv_pool.lab.curves.reuse import Numbers, Piece, Reuse, admit


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
        self._sizes = np.unique([0, *reuse.sizes.list_all("num_blocks")])
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
        admitted = int(self._sizes[np.searchsorted(self._sizes, capacity, "right") - 1])
        if admitted not in self._passes:
            self._passes[admitted] = _StepFunctions(admit(self._reuse, admitted), self._rate)
        return self._passes[admitted]


class _StepFunctions:
    """The counts of one pass as functions of the capacity."""

    def __init__(self, reuse: Reuse, rate: float) -> None:
        stack = LruStack(reuse, 1 / rate)
        for number, (size, pieces) in enumerate(reuse.list_pieces()):
            stack.access(number, size, pieces)
        self._block_size = reuse.block_size
        self._bends, changes = _sort(stack.slopes)
        self.last_bend = max(1, int(self._bends[-1]) - 1)
        self._slopes = np.cumsum(changes)
        self._offsets = np.cumsum(changes * (self._bends - 1))
        self._steps, missing = _sort(stack.missing_tokens)
        self._missing = np.cumsum(missing)

    def count(self, capacity: int) -> tuple[int, int]:
        bend = np.searchsorted(self._bends, capacity, "right") - 1
        step = np.searchsorted(self._steps, capacity, "right") - 1
        num_blocks = int(capacity * self._slopes[bend] - self._offsets[bend])
        return num_blocks, num_blocks * self._block_size - int(self._missing[step])


def _sort(by_capacity: dict[int, int]) -> tuple["np.ndarray", "np.ndarray"]:
    """Return the capacities in ascending order, from 0, and their values."""
    items = np.array(sorted({0: 0, **by_capacity}.items()), dtype=np.int64)
    return items[:, 0], items[:, 1]


_NEVER = 1 << 62


class LruStack:
    """Counts hits by least capacity. Each `access` is one request, in the order of the trace.

    Args:
        reuse: the requests.
        scale: number of blocks that each block of other requests stands for, if the requests are a sample.

    Attributes:
        slopes: change of the slope of "block hits over capacity", by capacity. A run of n blocks that are hit
            from the capacities c, c+1, ... on is +1 at c and -1 at c + n.
        missing_tokens: tokens by which a hit of a partial block falls short of a block, by the least capacity
            of the hit.
    """

    def __init__(self, reuse: Reuse, scale: float = 1.0) -> None:
        self.slopes: dict[int, int] = {}
        self.missing_tokens: dict[int, int] = {}
        self._block_size = reuse.block_size
        self._scale = scale
        self._tree = [0] * (len(reuse) + 1)  # a Fenwick tree: blocks per request
        self._num_blocks = 0
        self._blank_from = _NEVER
        # Older copies of blocks that were computed again and not hit since.
        self._older: dict[int, list[int]] = {}  # positions of older copies, by request
        self._owners_of_older: dict[int, dict[int, list[int]]] = {}  # by the last request and the position
        # Copies that no hit will touch: their request, position in it and threshold, in this order.
        self._copies: list[tuple[int, int, int]] = []

    def access(self, number: int, size: Numbers, pieces: list[Piece]) -> None:
        """Count the hits of a request, and move its blocks to the top.

        Args:
            number: of the request, counted from 0.
            size, pieces: as in `Reuse.list_pieces`.
        """
        num_cacheable, num_blocks, max_hit, input_length = size
        start = 0
        last = _NEVER
        new_copies: list[tuple[int, int, int]] = []
        resolved: list[tuple[int, int]] = []
        for owner, end in pieces:
            rank = self._count_above(owner) + len(self._older.get(owner, ())) + 1
            if self._scale != 1.0:  # the blocks above are `start` of its own, and others
                rank = start + 1 + round((rank - start - 1) * self._scale)
            thresholds = self._list_thresholds(owner, start)
            if max_hit > start:
                self._count_hits(start, min(end, max_hit), rank, thresholds, input_length)
            last = self._find_capacity(rank + end - start - 1, thresholds)
            if owner in self._owners_of_older:
                self._resolve(owner, start, min(end, max_hit), new_copies, resolved)
            start = end
        known = start
        # Nothing above has changed the order; from here on it changes.
        for owner, position in resolved:
            self._older[owner].remove(position)
            self._add(owner, -1)
        for copy in new_copies:
            insort(self._copies, copy)
        start = 0
        for owner, end in pieces:
            hit_end = max(start, min(end, max_hit))
            if hit_end > start:
                self._add(owner, start - hit_end)
            if end > hit_end:
                self._keep_older(number, owner, hit_end, end)
            self._forget_owners(owner, start, end)
            start = end
        if num_cacheable:
            self._add(number, num_cacheable)
        if num_blocks > num_cacheable:
            self._blank_from = 0
        elif max_hit < num_cacheable or known < num_cacheable:
            self._blank_from = _NEVER
        elif num_cacheable:
            self._blank_from = max(self._blank_from, last)

    def _count_hits(self, start: int, end: int, rank: int, thresholds: list[int], input_length: int) -> None:
        """Count hits of the blocks `start` to `end` of a prompt, which have consecutive ranks from `rank`."""
        first, stop = rank, rank + end - start
        for shift, threshold in enumerate([*thresholds, _NEVER]):
            stop_here = min(stop, threshold - shift)
            if first < stop_here:
                self.slopes[first + shift] = self.slopes.get(first + shift, 0) + 1
                self.slopes[stop_here + shift] = self.slopes.get(stop_here + shift, 0) - 1
                first = stop_here
            if first >= stop:
                break
        num_full = input_length // self._block_size
        for position in range(max(start, num_full), end):  # partial blocks at the end of a prompt
            capacity = self._find_capacity(rank + position - start, thresholds)
            tokens = max(0, min(input_length - position * self._block_size, self._block_size))
            self.missing_tokens[capacity] = self.missing_tokens.get(capacity, 0) + self._block_size - tokens

    def _find_capacity(self, rank: int, thresholds: list[int]) -> int:
        """Return the least capacity at which a block of this rank is cached."""
        capacity = rank
        for threshold in thresholds:
            if threshold > capacity:
                break
            capacity += 1
        return capacity

    def _list_thresholds(self, owner: int, position: int) -> list[int]:
        """Return the thresholds above a block, in ascending order."""
        found = [self._blank_from]
        for copy_owner, copy_position, threshold in self._copies[bisect_left(self._copies, (owner, 0, 0)) :]:
            if copy_owner > owner or copy_position < position:
                found.append(threshold)
        return sorted(found)

    def _resolve(
        self,
        owner: int,
        start: int,
        end: int,
        copies: list[tuple[int, int, int]],
        resolved: list[tuple[int, int]],
    ) -> None:
        """Find what a hit of the blocks `start` to `end` of request `owner` does to their copies."""
        for position, older in self._owners_of_older[owner].items():
            if not start <= position < end:
                continue
            for holder, newer in pairwise([*older, owner]):
                num_before = sum(other < position for other in self._older[holder])
                rank = self._count_above(holder) + num_before + 1
                least = self._find_capacity(rank, self._list_thresholds(holder, position))
                copies.append((newer, position, least))
                resolved.append((holder, position))

    def _keep_older(self, number: int, owner: int, start: int, end: int) -> None:
        """Leave the blocks `start` to `end` where they are: request `number` computes new copies of them."""
        known = self._owners_of_older.get(owner, {})
        chains = self._owners_of_older.setdefault(number, {})
        for position in range(start, end):
            chains[position] = [*known.get(position, ()), owner]
            self._older.setdefault(owner, []).append(position)

    def _forget_owners(self, owner: int, start: int, end: int) -> None:
        known = self._owners_of_older.get(owner)
        if known is not None:
            for position in range(start, end):
                known.pop(position, None)
            if not known:
                del self._owners_of_older[owner]

    def _add(self, number: int, num_blocks: int) -> None:
        self._num_blocks += num_blocks
        index = number + 1
        tree = self._tree
        size = len(tree)
        while index < size:
            tree[index] += num_blocks
            index += index & -index

    def _count_above(self, number: int) -> int:
        """Return the number of blocks of requests after `number`."""
        index = number + 1
        num_blocks = self._num_blocks
        tree = self._tree
        while index:
            num_blocks -= tree[index]
            index &= index - 1
        return num_blocks
