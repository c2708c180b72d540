"""`TwoQ`: a queue for runs used once, ghosts, and a list of runs that came back."""

from kv_pool.core.cache_policy import STAY, CachedRun, CachePolicy, Ghosts


class TwoQ(CachePolicy):
    """New runs wait in a first-in first-out queue of a quarter; those that return after it go to an LRU list.

    Johnson, Shasha: 2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm, VLDB 1994,
    the full version, with ghosts for half of the capacity. Needs no hints.
    """

    num_queues = 2

    def start(self) -> None:
        self.ghosts = Ghosts(self.capacity // 2)
        self.returning = b""

    def missed(self, key: bytes) -> None:
        self.returning = key if self.ghosts.pop(key) else self.returning

    def freed(self, run: CachedRun) -> int:
        if run.queue is None:
            return 1 if run.key == self.returning else 0
        return STAY if run.queue.index == 0 else 1

    def choose(self) -> int:
        first, again = self.queues
        is_full = first.num_blocks > self.capacity // 4
        return 0 if first.first is not None and (is_full or again.first is None) else 1

    def evicted(self, run: CachedRun, num_blocks: int) -> None:
        if run.queue is self.queues[0]:
            self.ghosts.add(run.get_tail_key(num_blocks), num_blocks)
