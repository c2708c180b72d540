"""`WTinyLFU`: a window, and a main part that admits by estimated frequency."""

from kv_pool.core.cache_policy import STAY, CachePolicy
from kv_pool.core.cached_runs import CachedRun

HALVES = bytes(count // 2 for count in range(256))


class WTinyLFU(CachePolicy):
    """New runs pass a window of 1 %, then displace the next victim of a segmented LRU if used more often.

    Queues: window, probation, protected (80 % of the rest). A count-min sketch, halved after uses of ten times
    the capacity. Einziger, Friedman, Manes: TinyLFU: A Highly Efficient Cache Admission Policy, ACM TOS 2017.
    """

    num_queues = 3

    def start(self) -> None:
        self.counts, self.num_samples, self.is_full = bytearray(8 * self.capacity + 64), 0, False

    def list_cells(self, run: CachedRun) -> list[int]:
        key = hash(run.key)
        return [((key >> shift) ^ key) % len(self.counts) for shift in (3, 17, 29, 41)]

    def cached(self, run: CachedRun) -> None:
        for cell in self.list_cells(run):
            self.counts[cell] = min(self.counts[cell] + 1, 15)
        self.num_samples += 1
        if self.num_samples >= 10 * self.capacity:
            self.counts, self.num_samples = self.counts.translate(HALVES), self.num_samples // 2

    def hit(self, run: CachedRun) -> None:
        self.cached(run)

    def freed(self, run: CachedRun) -> int:
        if run.queue is None or run.queue.index == 0:
            return 0
        self.queues[2].append(run)
        while self.queues[2].num_blocks > self.capacity * 4 // 5 and self.queues[2].first is not None:
            self.queues[1].append(self.queues[2].first)
        return STAY

    def choose(self) -> int:
        (window, probation, _), limit = self.queues, self.capacity // 100
        while window.first is not None and window.num_blocks > limit:
            victim = probation.first
            if self.is_full and victim is not None:
                uses = [
                    min(self.counts[cell] for cell in self.list_cells(run)) for run in (victim, window.first)
                ]
                if uses[1] <= uses[0]:
                    return 0
                limit = self.capacity
            probation.append(window.first)
        self.is_full = True
        return next(index for index in (1, 2, 0) if self.queues[index].first is not None)
