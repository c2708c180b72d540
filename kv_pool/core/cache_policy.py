"""`CachePolicy`: the base class of cache policies, which choose the cached blocks to evict."""

from collections.abc import Callable
from typing import Any, Final

from mypy_extensions import mypyc_attr

from kv_pool.core.cached_runs import CachedRun, Ghosts, RunQueue
from kv_pool.core.deadlines import read_clock

__all__ = ["STAY", "CachePolicy", "CachedRun", "Ghosts", "LRU", "RunQueue"]

STAY: Final = -1
"""The result of `CachePolicy.freed` for a run that keeps its place in its queue."""


@mypyc_attr(allow_interpreted_subclasses=True)
class CachePolicy:
    """A cache policy: in which queue freed runs go, and from which queue the next victim comes.

    A policy orders runs of cached blocks (`CachedRun`) in its queues; the pool's host keeps runs, queues and
    the free queue of blocks. Blocks without content are always reused first. The host evicts the last blocks
    of the front run of the chosen queue. It passes over runs in use and runs with cached children, which
    return to the front of their queue when they are free again and the last child is gone: no policy evicts a
    parent before its children, unless a copy of its last block is cached, behind which lookups find them, or
    a retention has claims on the children.

    The methods are called in the pool's calls; they must not call the pool. Each has a default, so a policy
    overrides what it needs. Cost: once per run and call of the pool, not once per block.

    Attributes:
        num_queues: number of queues. A class attribute.
        needs: what the policy uses of `CachedRun.hints` and `session_id`, in words; empty for nothing, and
            then both are None. A class attribute.
        queues: the queues; set by the host before `start`.
        capacity: number of blocks of the pool, without the null block.
        clock: returns the time in seconds.
    """

    num_queues: int = 1
    needs: str = ""

    def __init__(self) -> None:
        self.queues: list[RunQueue] = []
        self.capacity: int = 0
        self.clock: Callable[[], float] = read_clock

    def start(self) -> None:
        """Prepare for an empty cache of `capacity` blocks. Called once, before any other hook."""

    def missed(self, key: Any) -> None:
        """Handle a lookup whose first missing block has this key, before blocks are evicted for it.

        If the request is served, a run with this key as `CachedRun.key` is cached next. A request that waits
        may be looked up several times.
        """

    def cached(self, run: CachedRun) -> None:
        """Handle a new run. It is in use, in no queue, and may grow until it is freed or hit."""

    def hit(self, run: CachedRun) -> None:
        """Handle a request that hits the run. It is in use now, and still in its queue if it was in one."""

    def freed(self, run: CachedRun) -> int:
        """Return the queue to whose back the run goes, now that no request uses it; or `STAY`.

        The runs of a request are freed last one first.
        """
        return 0

    def choose(self) -> int:
        """Return the queue whose front run loses its last blocks. The queue must not be empty.

        At least one queue is not empty. May move runs between queues (`RunQueue.append`). Called again
        whenever the host passes over a run, and after at most as many blocks as the run has.
        """
        return 0

    def evicted(self, run: CachedRun, num_blocks: int) -> None:
        """Handle the eviction of the last `num_blocks` blocks of the run: all of them, or fewer."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LRU(CachePolicy):
    """Least recently used: evict the run that was freed longest ago. vLLM's order, and the default."""
