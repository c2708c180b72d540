"""`OptimumCurve`: the hits of optimal replacement at any capacity, from the pieces of the prompts.

A block that is used by request t and then by request r is a hit at r if the pool keeps it from t to r. The
pool keeps at most C - b(s) such blocks across a request s of b(s) blocks that does not use them, and always
has enough space if it does so. The most hits are therefore the largest set of intervals (t, r) of which at
most C - b(s) contain any s. Choosing intervals in the order of their ends, whenever the capacity allows, is
optimal: Belady's MIN, which evicts the block with the latest next use (Belady, "A study of replacement
algorithms for a virtual-storage computer", IBM Systems Journal, 1966), chooses the same ones.

All intervals considered end now, so of the free capacity only its minimum from t to now matters. It grows
with t; `_grown` has its increments. Choosing n intervals from t to now decreases the minimum of every start
from t on by n, and limits that of earlier starts: it removes n increments, the latest ones at or before t.
Every request adds one entry and removals only delete, so with union-find for the latest entry at or before t
(Tarjan, 1975) a pass is almost linear in the number of pieces. This is the idea of the critical stack
(Bilardi, Ekanadham and Pattnaik, "Optimal on-line computation of stack distances for MIN and OPT", Computing
Frontiers, 2017), for one capacity and for intervals of many blocks.
"""

from array import array

from kv_pool.lab.curves.reuse import Numbers, Piece, Reuse, admit


class OptimumCurve:
    """The hits of optimal replacement at any capacity, each from one pass over the pieces of a trace.

    The block hits are the most that any replacement reaches in the pool of the instant clock, whichever free
    blocks it evicts: requests run one at a time, hold all their blocks meanwhile, always cache their full
    blocks, and are refused if they are larger than the pool. So are the token hits if each hit block counts
    the same number of tokens (`has_optimal_tokens`); otherwise only an upper bound is known.

    The optimum evicts no parent before its children, with one exception: a block that its next request must
    compute again (`max_hit`) is worthless until then, even if it has children. If a trace has such blocks
    (`is_prefix_closed` is False), the counts are an upper bound for policies that keep prefixes whole.

    Args:
        reuse: the pieces of a trace.
        rate: share of the trace's sessions that `reuse` has. Below 1, the counts are estimates: this share of
            the blocks that a request leaves is free for the sample.
    """

    def __init__(self, reuse: Reuse, rate: float = 1.0) -> None:
        self._reuse = reuse
        self._rate = rate
        self._passes: dict[int, tuple[int, int]] = {}
        block_size = reuse.block_size
        self.has_optimal_tokens = all(
            max_hit * block_size <= input_length for _, _, max_hit, input_length in reuse.sizes
        )
        self.is_prefix_closed = not reuse.num_recomputed

    def count_hits(self, capacity: int) -> tuple[int, int]:
        """Return the block hits of optimal replacement in `capacity` usable blocks, and its token hits.

        The token hits are those of the replacement with the most block hits.

        Cost: O(pieces) for each new capacity.
        """
        if capacity not in self._passes:
            self.list_hits(capacity)
        return self._passes[capacity]

    def list_hits(self, capacity: int) -> "array[int]":
        """Return the block hits of each request with the optimum in `capacity` blocks; 0 if it is refused.

        Keeps their sums for `count_hits`.

        Cost: O(pieces).
        """
        reuse = admit(self._reuse, capacity)
        one_pass = _OptimumPass(len(reuse))
        num_tokens = 0
        hits = array("q")
        for number, (size, pieces) in enumerate(reuse.list_pieces()):
            _, num_blocks, _, input_length = size
            num_kept_across = round((capacity - num_blocks) * self._rate)
            hits.append(one_pass.access(number, num_kept_across, size, pieces))
            num_tokens += min(hits[-1] * reuse.block_size, input_length)
        self._passes[capacity] = sum(hits), num_tokens
        left = iter(hits)
        sizes = self._reuse.sizes.list_all("num_blocks")
        return array("q", [next(left) if size <= capacity else 0 for size in sizes])

    def bound_tokens(self, capacity: int) -> int:
        """Return an upper bound of the token hits: the most possible if `has_optimal_tokens`."""
        num_blocks, num_tokens = self.count_hits(capacity)
        if self.has_optimal_tokens:
            return num_tokens
        num_blocks_of_all = round(self._reuse.num_distinct / self._rate) + self._reuse.largest_request
        unlimited = self.count_hits(num_blocks_of_all)
        return min(num_blocks * self._reuse.block_size, unlimited[1])


class _OptimumPass:
    """Counts the hits of optimal replacement at one capacity. Each `access` is one request, in order.

    Args:
        num_requests: number of requests.
    """

    def __init__(self, num_requests: int) -> None:
        self._free = 0  # the sum of `_grown`
        # Entry n + 1 belongs to request n; entry 0 to the time before the first request.
        self._grown = [0] * (num_requests + 1)
        self._before = list(range(num_requests + 1))  # an entry at or before this one that may not be empty

    def access(self, number: int, num_kept_across: int, size: Numbers, pieces: list[Piece]) -> int:
        """Return the number of blocks of a request that are hits, from its head.

        Args:
            number: of the request, counted from 0.
            num_kept_across: blocks that the pool can keep for later while the request runs: the capacity
                without all blocks of the request.
            size, pieces: as in `Reuse.list_pieces`.
        """
        num_cacheable, _, max_hit, _ = size
        start = 0
        for owner, end in pieces:
            # The first pieces are the shortest intervals, so a parent is kept in preference to its children.
            wanted = min(end, max_hit) - start
            if wanted <= 0:
                break
            kept = self._remove(owner + 1, wanted)
            start += kept
            if kept < wanted:
                break
        self._remove(number, self._free - num_kept_across)
        self._grown[number + 1] = num_cacheable
        self._free += num_cacheable
        return start

    def _remove(self, entry: int, wanted: int) -> int:
        """Remove up to `wanted` increments, the latest ones at or before `entry`. Return their number."""
        grown = self._grown
        left = wanted
        while left > 0:
            entry = self._find(entry)
            here = grown[entry]
            if here > left:
                grown[entry] = here - left
                left = 0
            else:
                left -= here
                grown[entry] = 0
                if entry == 0:
                    break
                self._before[entry] = entry - 1
        removed = wanted - left if wanted > 0 else 0
        self._free -= removed
        return removed

    def _find(self, entry: int) -> int:
        before = self._before
        while before[entry] != entry:
            before[entry] = before[before[entry]]
            entry = before[entry]
        return entry
