"""`ARC`: adaptive replacement cache."""

from kv_pool.core.cache_policy import CachePolicy
from kv_pool.core.cached_runs import CachedRun
from kv_pool.core.ghosts import Ghosts


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
                ratio = self.ghosts[1 - self.source].num_blocks / self.ghosts[self.source].num_blocks
                change = max(ratio, 1.0) * (1 - 2 * self.source)
                self.target = min(max(self.target + change, 0.0), float(self.capacity))

    def cached(self, run: CachedRun) -> None:
        if self.source >= 0 and run.key == self.coming:
            run.count = 1
            self.ghosts[self.source].pop(self.coming)
        self.coming, self.source = b"", -1

    def hit(self, run: CachedRun) -> None:
        run.count = 1

    def freed(self, run: CachedRun) -> int:
        return run.count

    def choose(self) -> int:
        once, again = self.queues
        if once.first is None or again.first is None:
            return 1 if once.first is None else 0
        num_once = once.num_blocks
        is_over = num_once > self.target or (num_once == self.target and self.source == 1)
        return 0 if is_over or (self.source < 0 and num_once >= self.capacity) else 1

    def evicted(self, run: CachedRun, num_blocks: int) -> None:
        (once, again), num_once = self.ghosts, self.queues[0].num_blocks
        while self.source < 0 and len(once) and num_once + once.num_blocks >= self.capacity:
            once.drop_oldest()
        num_known = num_once + self.queues[1].num_blocks + once.num_blocks
        while self.source < 0 and len(again) and num_known + again.num_blocks >= 2 * self.capacity:
            again.drop_oldest()
        if self.source >= 0 or num_once < self.capacity:
            self.ghosts[run.count].add(run.get_tail_key(num_blocks), num_blocks)
