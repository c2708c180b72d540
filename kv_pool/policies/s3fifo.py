"""`S3FIFO`: a small, a main and a ghost queue."""

from kv_pool.core.cache_policy import STAY, CachedRun, CachePolicy, Ghosts


class S3FIFO(CachePolicy):
    """New runs pass a small queue; with two hits, or if they return after eviction, they go to the main one.

    Runs hit in the main queue are inserted again, up to three times. Yang et al.: FIFO Queues are All You
    Need for Cache Eviction, SOSP 2023; as in libCacheSim, the main queue also takes new runs until the cache
    is full.
    """

    num_queues = 2

    def start(self) -> None:
        self.small_blocks = self.capacity // 10
        self.ghosts = Ghosts(self.capacity * 9 // 10)
        self.returning = b""
        self.is_full = False

    def missed(self, key: bytes) -> None:
        self.returning = key if self.ghosts.pop(key) else self.returning

    def hit(self, run: CachedRun) -> None:
        run.count += 1

    def freed(self, run: CachedRun) -> int:
        if run.queue is not None:
            return STAY
        has_room = self.is_full or self.queues[0].num_blocks < self.small_blocks
        return 0 if has_room and run.key != self.returning else 1

    def choose(self) -> int:
        self.is_full = True
        small, main = self.queues
        while small.first is not None and main.num_blocks <= self.capacity - self.small_blocks:
            if small.first.count < 2:
                return 0
            small.first.count = 0
            main.append(small.first)
        while main.first is not None and main.first.count > 0:
            main.first.count = min(main.first.count, 3) - 1
            main.append(main.first)
        return 0 if main.first is None else 1

    def evicted(self, run: CachedRun, num_blocks: int) -> None:
        if run.queue is self.queues[0]:
            self.ghosts.add(run.get_tail_key(num_blocks), num_blocks)
