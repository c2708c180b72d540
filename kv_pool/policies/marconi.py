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
        self.highest = 0  # the highest class used so far

    def freed(self, run: CachedRun) -> int:
        self.now += 1
        run.stamp = self.now
        num_tokens = run.num_tokens if run.parent is not None else run.position + run.num_tokens
        run.value = num_tokens * (run.cost / run.num_tokens) / run.num_blocks
        index = min(int(run.value).bit_length(), NUM_CLASSES - 1)
        self.highest = max(self.highest, index)
        return index

    def choose(self) -> int:
        oldest, newest, most = self.now, 0, 0.0
        for index in range(self.highest + 1):
            run = self.queues[index].first
            if run is not None:
                oldest, newest, most = min(oldest, run.stamp), max(newest, run.stamp), max(most, run.value)
        lowest, best = 0.0, -1
        for index in range(self.highest + 1):
            run = self.queues[index].first
            if run is not None:
                score = (run.stamp - oldest) / max(newest - oldest, 1) + WEIGHT * run.value / most
                if best < 0 or score < lowest:
                    lowest, best = score, index
        return best
