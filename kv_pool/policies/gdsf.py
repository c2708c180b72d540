"""`GDSF`: greedy dual by the cost to recompute a block."""

from typing import Final

from kv_pool.core.cache_policy import CachedRun, CachePolicy

NUM_QUEUES: Final = 1000
STEPS: Final = 4  # queues per unit of value


class GDSF(CachePolicy):
    """Evict the run with the lowest age plus uses times cost per token. Later tokens cost more: attention.

    The age is the value of the last victim. A parent is worth at least as much as its children when they were
    freed. One queue per quarter of a token's cost, in a circle. Cherkasova: Improving WWW Proxies Performance
    with Greedy-Dual-Size-Frequency Caching Policy, HPL-98-69R1, 1998. Needs no hints.
    """

    num_queues = NUM_QUEUES

    def start(self) -> None:
        self.age = 0

    def freed(self, run: CachedRun) -> int:
        worth = STEPS * (run.num_hits + 1) * run.cost / run.num_tokens
        run.value = max(run.value, self.age + min(worth, NUM_QUEUES - 1.0))
        if run.parent is not None:
            run.parent.value = max(run.parent.value, run.value)
        return int(run.value) % NUM_QUEUES

    def choose(self) -> int:
        while self.queues[self.age % NUM_QUEUES].first is None:
            self.age += 1
        return self.age % NUM_QUEUES
