"""`OptimumCurve`: the hits of optimal replacement at any capacity."""

from array import array

from kv_pool.replay.curves.optimum_pass import OptimumPass
from kv_pool.replay.curves.reuse import Reuse, admit


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
            max_hit * block_size <= input_length
            for max_hit, input_length in zip(reuse.max_hit, reuse.input_length, strict=True)
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

        Cost: O(pieces).
        """
        admitted = self._replay(admit(self._reuse, capacity), capacity)
        if len(admitted) == len(self._reuse):
            return admitted
        left = iter(admitted)
        return array("q", [next(left) if size <= capacity else 0 for size in self._reuse.num_blocks])

    def bound_tokens(self, capacity: int) -> int:
        """Return an upper bound of the token hits: the most possible if `has_optimal_tokens`."""
        num_blocks, num_tokens = self.count_hits(capacity)
        if self.has_optimal_tokens:
            return num_tokens
        num_blocks_of_all = round(self._reuse.num_distinct / self._rate) + self._reuse.largest_request
        unlimited = self.count_hits(num_blocks_of_all)
        return min(num_blocks * self._reuse.block_size, unlimited[1])

    def _replay(self, reuse: Reuse, capacity: int) -> "array[int]":
        """Return the block hits of each request, and keep their sum for `count_hits`."""
        one_pass = OptimumPass(len(reuse))
        access = one_pass.access
        first, owner, end = reuse.first_piece.tolist(), reuse.owner.tolist(), reuse.end.tolist()
        block_size = reuse.block_size
        num_tokens = 0
        hits = array("q")
        for number in range(len(reuse)):
            begin, stop = first[number], first[number + 1]
            access(
                number,
                round((capacity - reuse.num_blocks[number]) * self._rate),
                reuse.num_cacheable[number],
                reuse.max_hit[number],
                owner[begin:stop],
                end[begin:stop],
            )
            num_tokens += min(one_pass.hits * block_size, reuse.input_length[number])
            hits.append(one_pass.hits)
        self._passes[capacity] = one_pass.num_hits, num_tokens
        return hits
