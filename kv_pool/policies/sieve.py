"""`SIEVE`: first in, first out with a hand that spares runs that were hit."""

from kv_pool.core.cache_policy import STAY, CachedRun, CachePolicy


class SIEVE(CachePolicy):
    """A hand moves from the oldest to the newest run and evicts those that were not hit since it came by.

    The queue is cut at the hand: the runs before it, which are next, and those that it has passed. Zhang et
    al.: SIEVE is Simpler than LRU, NSDI 2024. Needs no hints.
    """

    num_queues = 2

    def start(self) -> None:
        self.ahead: int = 0

    def hit(self, run: CachedRun) -> None:
        run.count = 1

    def freed(self, run: CachedRun) -> int:
        if run.queue is not None:
            return STAY
        if self.queues[self.ahead].num_blocks == 0:
            self.ahead = 1 - self.ahead
        return self.ahead

    def choose(self) -> int:
        while True:
            run = self.queues[self.ahead].first
            if run is None:
                self.ahead = 1 - self.ahead
            elif run.count == 0:
                return self.ahead
            else:
                run.count = 0
                self.queues[1 - self.ahead].append(run)
