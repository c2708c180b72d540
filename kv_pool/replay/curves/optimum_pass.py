"""`OptimumPass`: the hits of optimal replacement at one capacity, from the pieces of the prompts.

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


class OptimumPass:
    """Counts the hits of optimal replacement at one capacity. Each `access` is one request, in order.

    Args:
        num_requests: number of requests that follow.

    Attributes:
        hits: blocks of the last request that are hits, from its head.
        num_hits: block hits of all requests.
    """

    def __init__(self, num_requests: int) -> None:
        self.hits = 0
        self.num_hits = 0
        self._free = 0  # the sum of `_grown`
        # Entry n + 1 belongs to request n; entry 0 to the time before the first request.
        self._grown = [0] * (num_requests + 1)
        self._before = list(range(num_requests + 1))  # an entry at or before this one that may not be empty

    def access(
        self,
        number: int,
        num_kept_across: int,
        num_cacheable: int,
        max_hit: int,
        owners: list[int],
        ends: list[int],
    ) -> None:
        """Count the hits of a request.

        Args:
            number: of the request, counted from 0.
            num_kept_across: blocks that the pool can keep for later while the request runs: the capacity
                without all blocks of the request.
            owners, ends: its pieces, as in `Reuse`.
        """
        start = 0
        for index in range(len(owners)):
            # The first pieces are the shortest intervals, so a parent is kept in preference to its children.
            wanted = min(ends[index], max_hit) - start
            if wanted <= 0:
                break
            kept = self._remove(owners[index] + 1, wanted)
            start += kept
            if kept < wanted:
                break
        self.hits = start
        self.num_hits += start
        self._remove(number, self._free - num_kept_across)
        self._grown[number + 1] = num_cacheable
        self._free += num_cacheable

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
