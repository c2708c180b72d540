"""`ARC`: adaptive replacement cache."""

from kv_pool.core.cache_policy import CachedRun, CachePolicy, Ghosts


class ARC(CachePolicy):
    """Runs used once (0) and again (1), each with ghosts; ghosts that return move the target between them.

    Megiddo, Modha: ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003. Needs no hints.
    """

    num_queues = 2

    def start(self) -> None:
        self.target = 0.0  # blocks of the runs used once
        self.ghosts = [Ghosts(2 * self.capacity), Ghosts(2 * self.capacity)]
        self.coming, self.source = b"", -1  # the key that is coming, and which ghosts have it

    def missed(self, key: bytes) -> None:
        if key != self.coming:
            self.coming, self.source = key, 0 if key in self.ghosts[0] else 1 if key in self.ghosts[1] else -1
            if self.source >= 0:
                found, other = self.ghosts[self.source], self.ghosts[1 - self.source]
                change = max(other.num_blocks / found.num_blocks, 1.0) * (1 - 2 * self.source)
                self.target = min(max(self.target + change, 0.0), float(self.capacity))

    def cached(self, run: CachedRun) -> None:
        if self.source >= 0 and run.key == self.coming:
            run.count = min(self.ghosts[self.source].pop(self.coming), 1)
        self.coming, self.source = b"", -1

    def hit(self, run: CachedRun) -> None:
        run.count = 1

    def freed(self, run: CachedRun) -> int:
        return run.count

    def choose(self) -> int:
        once, again = self.queues
        is_over = once.num_blocks > self.target or (once.num_blocks == self.target and self.source == 1)
        is_over |= again.first is None or (self.source < 0 and once.num_blocks >= self.capacity)
        return 0 if once.first is not None and is_over else 1

    def evicted(self, run: CachedRun, num_blocks: int) -> None:
        size, (once, again) = self.queues[0].num_blocks, self.ghosts
        if self.source < 0:
            once.shrink(self.capacity - size - num_blocks)
            again.shrink(2 * self.capacity - size - self.queues[1].num_blocks - once.num_blocks - num_blocks)
        if self.source >= 0 or size < self.capacity:
            self.ghosts[run.count].add(run.get_tail_key(num_blocks), num_blocks)
