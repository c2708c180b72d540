"""`Marconi`: recency and the computation that a block saves per byte."""

from kv_pool.core.cache_policy import CachedRun, CachePolicy

NUM_CLASSES = 24
WEIGHT = 1.0


class Marconi(CachePolicy):
    """Evict by recency plus weighted saved computation per byte, both relative to the candidates' largest.

    A state, in a group whose hits need only the last block, saves all computation before it; a block of
    another group only its own. Runs are classed by the power of two of that value; the candidates are the
    oldest of each class. Pan et al.: Marconi: Prefix Caching for the Era of Hybrid LLMs, MLSys 2025. Needs no
    hints.
    """

    num_queues = NUM_CLASSES

    def start(self) -> None:
        self.now = 0

    def freed(self, run: CachedRun) -> int:
        self.now += 1
        run.stamp = self.now
        num_tokens = run.num_tokens if run.parent is not None else run.position + run.num_tokens
        run.value = num_tokens * (run.cost / run.num_tokens) / run.num_blocks
        return min(int(run.value).bit_length(), NUM_CLASSES - 1)

    def choose(self) -> int:
        fronts = [(queue.first, queue.index) for queue in self.queues]
        found = [(run, index) for run, index in fronts if run is not None]
        oldest = min(run.stamp for run, _ in found)
        newest = max(max(run.stamp for run, _ in found) - oldest, 1)
        most = max(run.value for run, _ in found)
        return min(
            ((run.stamp - oldest) / newest + WEIGHT * run.value / most, index) for run, index in found
        )[1]
