"""`LFU`: least frequently used, with dynamic ageing."""

from typing import Final

from kv_pool.core.cache_policy import CachedRun, CachePolicy

NUM_QUEUES: Final = 4096


class LFU(CachePolicy):
    """Evict the run with the lowest count of uses plus age; the cache's age is the value of the last victim.

    One queue per value, in a circle; counts end at 4,095. Arlitt et al.: Evaluating Content Management
    Techniques for Web Proxy Caches, ACM SIGMETRICS PER 27(4), 2000 (LFU-DA). Needs no hints.
    """

    num_queues = NUM_QUEUES

    def start(self) -> None:
        self.age = 0

    def freed(self, run: CachedRun) -> int:
        return (self.age + min(run.num_hits + 1, NUM_QUEUES - 1)) % NUM_QUEUES

    def choose(self) -> int:
        while self.queues[self.age % NUM_QUEUES].first is None:
            self.age += 1
        return self.age % NUM_QUEUES
