"""`Defragmenter`: when to compact, and how much per step; `BackgroundDefragmenter`: the same in a thread."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from kv_pool.errors import InvalidArgumentError
from kv_pool.loggers import get_logger
from kv_pool.threads import start_thread

_logger = get_logger(__name__)


class Defragmentable(Protocol):
    """A pool that can be compacted in steps, such as `GPUKVPool` and `ControlledManager`."""

    def defragment(
        self, max_evictions: int = 0, max_moves: int | None = None, goal: float | None = None
    ) -> int:
        """Move at most `max_moves` blocks towards the rate `goal`; return how many moved."""

    def get_fragmentation_rate(self) -> float:
        """Return the share of possible free runs that is lost to fragmentation, 0 to 1."""


class Defragmenter:
    """Compacts a pool by threshold and interval, with a limit on moves per step.

        >>> from kv_pool import BlockAllocationRequest, GPUKVPool
        >>> pool = GPUKVPool(total_blocks=64, block_size=16, run_length=8)
        >>> for number in range(16):
        ...     ids = pool.allocate(BlockAllocationRequest(num_blocks=4, sequence_id=number))
        >>> for number in range(0, 16, 2):
        ...     freed = pool.free_sequence(number)
        >>> defragmenter = Defragmenter(pool, interval_s=0, max_moves=6)
        >>> [(defragmenter.step(), round(pool.get_fragmentation_rate(), 2)) for _ in range(4)]
        [(6, 0.75), (6, 0.25), (4, 0.0), (0, 0.0)]

    The engine calls `step()` between its own steps, when it has no kernel left to launch that uses old block
    ids. A step pauses the engine for planning and `max_moves` copies, however fragmented the pool is. If the
    engine has no such point, `BackgroundDefragmenter` calls `step()` from a thread.

    Args:
        threshold: start a compaction when the fragmentation rate is above this.
        goal: end it when the rate is at most this, or nothing moves any more; by default half the threshold,
            so that the next compaction does not start at once.
        interval_s: seconds between two checks of an idle pool; a started compaction continues at every step.
        max_moves: per step; None for a whole compaction in one step. An exchange is two moves: in a full
            cache a step with 1 moves nothing.
        max_evictions: how many cached blocks a step may overwrite where empty blocks are missing, which takes
            fewer copies; by default nothing is evicted.
        clock: returns seconds.

    Attributes:
        is_compacting: whether a compaction is in progress.
        num_compactions: number of compactions started so far.
        num_moves: number of blocks moved so far.
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
        # Planning uses NumPy, whose first import takes 100 ms: too long for a step.
        import numpy  # noqa: F401

        goal = threshold / 2 if goal is None else goal
        if not 0 <= goal <= threshold <= 1:
            raise InvalidArgumentError(
                f"goal is {goal}, threshold {threshold}; both are 0 to 1, and goal is at most threshold"
            )
        if interval_s < 0 or max_evictions < 0:
            raise InvalidArgumentError(
                f"interval_s is {interval_s}, max_evictions {max_evictions}; both must be 0 or more"
            )
        if max_moves is not None and max_moves < 1:
            raise InvalidArgumentError(f"max_moves is {max_moves}; it is 1 or more, or None")
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
        """Check the fragmentation rate if a check is due, and compact up to `max_moves` blocks if needed.

        Returns:
            How many blocks changed their id.
        Raises:
            CopyFailedError: these blocks have not moved; the next attempt follows after the interval.
        Cost: while idle, one call of the clock, and O(blocks of the pool) for each check; while compacting,
        O(blocks of the pool) in NumPy, plus the copy of `max_moves` blocks.
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


class BackgroundDefragmenter:
    """A thread that calls `Defragmenter.step` until it is stopped.

        with BackgroundDefragmenter(Defragmenter(pool, max_moves=32), guard=between_steps):
            engine.run()

    Args:
        defragmenter: the defragmenter to call; do not call it elsewhere meanwhile.
        pause_s: seconds from the end of one step to the start of the next one.
        guard: held during each step, in which ids change. It must prevent the engine from using ids that it
            has read before, such as a lock that the engine holds while it prepares and runs a step. On a GPU
            the engine's streams must also wait for the copy: `BlockStorage.use_copy_stream`.

    Attributes:
        error: the exception that ended the thread; None if there was none.
    """

    def __init__(
        self,
        defragmenter: Defragmenter,
        pause_s: float = 0.01,
        guard: AbstractContextManager[object] | None = None,
    ) -> None:
        if pause_s < 0:
            raise InvalidArgumentError(f"pause_s is {pause_s}; it is 0 or more")
        self.defragmenter = defragmenter
        self.pause_s = pause_s
        self.error: Exception | None = None
        self._guard = nullcontext() if guard is None else guard
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread.

        Raises:
            InvalidArgumentError: the thread is already running.
            OutOfThreadsError: the system cannot start a thread.
        """
        if self._thread is not None:
            raise InvalidArgumentError("the background defragmenter is already running; stop() it first")
        self.error = None
        self._stopping.clear()
        self._thread = start_thread("kv_pool defragmenter", self._run)

    def stop(self) -> None:
        """Stop the thread after its current step. No-op if it is not running.

        Raises:
            The exception of a step that has ended the thread; it was logged then.
        """
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self.error is not None:
                raise self.error

    def __enter__(self) -> "BackgroundDefragmenter":
        self.start()
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        try:
            self.stop()
        except Exception:
            if error is None:
                raise

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self.pause_s):
                with self._guard:
                    self.defragmenter.step()
        except Exception as error:
            self.error = error
            _logger.exception("the background defragmenter has ended; no block of this step has moved")
