"""`WorkloadAware`: evict what is least likely to be reused, by category."""

from math import pow as power
from typing import Any, Final

from kv_pool.core.cache_policy import CachedRun, CachePolicy

NUM_CATEGORIES: Final = 32


class _Category:
    """The runs of a category that were freed and reused so far, and the seconds until they were reused."""

    def __init__(self) -> None:
        self.freed: float = 1.0
        self.reused: float = 1.0
        self.seconds: float = 1.0


class WorkloadAware(CachePolicy):
    """One LRU queue per category; evict the front with the lowest probability of reuse in the near future.

    Reuse times of a category are taken as exponential, with the rate and the share of reused runs seen so
    far. Ties go to the older run. Wang et al.: KVCache Cache in the Wild: Characterizing and Optimizing
    KVCache Cache at a Large Cloud Provider, USENIX ATC 2025.
    """

    num_queues = NUM_CATEGORIES
    needs = "kv_hints['category'], such as the application or the turn; without it, whether a run was hit"

    def start(self) -> None:
        self.indices: dict[Any, int] = {}
        self.categories = [_Category() for _ in range(NUM_CATEGORIES)]  # by queue

    def hit(self, run: CachedRun) -> None:
        if run.queue is not None and run.value > 0:
            category = self.categories[run.queue.index]
            category.reused += 1.0
            category.seconds += self.clock() - run.value

    def freed(self, run: CachedRun) -> int:
        category = run.hints.get("category") if run.hints is not None else run.num_hits > 0
        index = self.indices.get(category, -1)
        if index < 0:
            index = self.indices[category] = len(self.indices) % NUM_CATEGORIES
        run.value = self.clock()
        self.categories[index].freed += 1.0
        return index

    def choose(self) -> int:
        now, lowest, oldest, best = self.clock(), 2.0, 0.0, 0
        for index in range(min(len(self.indices), NUM_CATEGORIES)):
            run, category = self.queues[index].first, self.categories[index]
            if run is not None:  # reused so far or within one mean time, given the idle time
                reused = category.reused
                left = reused * power(2.718281828, -min((now - run.value) * reused / category.seconds, 60.0))
                share = left / (left + max(category.freed - reused, 1.0))
                if share < lowest or (share == lowest and run.value < oldest):
                    lowest, oldest, best = share, run.value, index
        return best
