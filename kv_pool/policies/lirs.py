"""`LIRS`: low inter-reference recency set."""

from kv_pool.core.cache_policy import STAY, CachedRun, CachePolicy, Ghosts


class LIRS(CachePolicy):
    """Queue 1: runs whose last two uses are close (LIR), by recency; queue 0: the others, 1 % of the blocks.

    A run becomes LIR if its last use is more recent than that of the oldest LIR run, as in the paper's stack.
    Ghosts keep last uses for the capacity. Jiang, Zhang: LIRS: An Efficient Low Inter-reference Recency Set
    Replacement Policy, SIGMETRICS 2002. Needs no hints.
    """

    num_queues = 2

    def start(self) -> None:
        self.now = 0
        self.low_blocks = self.capacity - max(1, self.capacity // 100)
        self.ghosts = Ghosts(self.capacity)
        self.uses: dict[bytes, int] = {}

    def cached(self, run: CachedRun) -> None:
        run.stamp = self.uses.pop(run.key, 0) if self.ghosts.pop(run.key) else 0

    def freed(self, run: CachedRun) -> int:
        other, low = self.queues
        oldest = low.first
        is_close = oldest is not None and run.stamp > oldest.stamp
        has_room = low.num_blocks + run.num_blocks <= self.low_blocks and run.queue is None
        self.now += 1
        run.stamp = self.now
        if not (is_close or has_room or run.queue is low):
            return 0
        low.append(run)
        while low.num_blocks > self.low_blocks and low.first is not None:
            other.append(low.first)
        return STAY

    def choose(self) -> int:
        return 1 if self.queues[0].first is None else 0

    def evicted(self, run: CachedRun, num_blocks: int) -> None:
        key = run.get_tail_key(num_blocks)
        self.uses[key] = run.stamp
        for dropped in self.ghosts.add(key, num_blocks):
            self.uses.pop(dropped, None)
