"""`Defragmenter`: when to compact, and how much at a time."""

import time
from collections.abc import Callable
from typing import Protocol

from kv_pool.errors import InvalidArgumentError


class Defragmentable(Protocol):
    """A pool that can be compacted in steps, such as `GPUKVPool` and `ControlledManager`."""

    def defragment(
        self, max_evictions: int = 0, max_moves: int | None = None, goal: float | None = None
    ) -> int:
        """Move blocks, `max_moves` at most, until the rate is `goal`; how many, 0 when nothing is left."""

    def get_fragmentation_rate(self) -> float:
        """Share of the possible runs of free blocks that is lost to scattering, 0 to 1."""


class Defragmenter:
    """Compacts a pool by threshold and interval, with a budget of moves per step.

        >>> from kv_pool import BlockAllocationRequest, GPUKVPool
        >>> pool = GPUKVPool(total_blocks=64, block_size=16, run_length=8)
        >>> for number in range(16):
        ...     ids = pool.allocate(BlockAllocationRequest(num_blocks=4, sequence_id=number))
        >>> for number in range(0, 16, 2):
        ...     freed = pool.free_sequence(number)
        >>> defragmenter = Defragmenter(pool, interval_s=0, max_moves=6)
        >>> [(defragmenter.step(), round(pool.get_fragmentation_rate(), 2)) for _ in range(4)]
        [(6, 0.75), (6, 0.25), (4, 0.0), (0, 0.0)]

    An engine calls `step()` between two of its own steps, when no kernel that it has yet to launch was given
    a block's old id: the pause is that of planning and `max_moves` copies, whatever the size of the pool's
    disorder. Where the engine has no such place, `BackgroundDefragmenter` calls it from a thread.

    Args:
        threshold: a compaction begins when the fragmentation rate is above this.
        goal: it ends when the rate is this or below, or nothing moves any more; half of the threshold by
            default, so that the next one is not due at once.
        interval_s: seconds from one look at an idle pool to the next; a compaction that has begun goes on
            at every step.
        max_moves: per step; None for a whole compaction in one step. Two blocks that change places are two
            moves: in a full cache a step with 1 moves nothing.
        max_evictions: cached blocks that a step may overwrite where too little is empty, which takes fewer
            copies; by default nothing is evicted.
        clock: seconds.

    Attributes:
        is_compacting: a compaction has begun and is not at its end.
        num_compactions: begun so far.
        num_moves: blocks moved so far.
    """

    def __init__(
        self,
        pool: Defragmentable,
        *,
        threshold: float = 0.10,
        goal: float | None = None,
        interval_s: float = 1.0,
        max_moves: int | None = None,
        max_evictions: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Plans are made in NumPy: its first import takes 100 ms, too long for a step.
        import numpy  # noqa: F401

        goal = threshold / 2 if goal is None else goal
        if not 0 <= goal <= threshold <= 1:
            raise InvalidArgumentError(
                f"goal is {goal}, threshold {threshold}; rates are 0 to 1, the goal not above the threshold"
            )
        if interval_s < 0 or max_evictions < 0:
            raise InvalidArgumentError(
                f"interval_s is {interval_s}, max_evictions {max_evictions}; neither is negative"
            )
        if max_moves is not None and max_moves < 1:
            raise InvalidArgumentError(f"max_moves is {max_moves}; a step moves 1 block at least, or None")
        self.pool = pool
        self.threshold = threshold
        self.goal = goal
        self.interval_s = interval_s
        self.max_moves = max_moves
        self.max_evictions = max_evictions
        self.is_compacting = False
        self.num_compactions = 0
        self.num_moves = 0
        self._clock = clock
        self._next_look_s = float("-inf")

    def step(self) -> int:
        """Look if it is time to, and compact a little if there is need.

        Returns:
            How many blocks changed their id.
        Raises:
            CopyFailedError: those blocks have not moved; the next attempt comes after the interval.
        Cost: while idle, one call of the clock between looks, and O(blocks of the pool) for a look; while
        compacting O(blocks of the pool) in NumPy, and the copy of `max_moves` blocks.
        """
        if not self.is_compacting:
            now = self._clock()
            if now < self._next_look_s:
                return 0
            self._next_look_s = now + self.interval_s
            if self.pool.get_fragmentation_rate() <= self.threshold:
                return 0
            self.num_compactions += 1
        self.is_compacting = False
        num_moved = self.pool.defragment(self.max_evictions, self.max_moves, self.goal)
        self.num_moves += num_moved
        if num_moved:
            self.is_compacting = self.pool.get_fragmentation_rate() > self.goal
        if not self.is_compacting:
            self._next_look_s = self._clock() + self.interval_s
        return num_moved
