"""`WTinyLFU`: a window, and a main part that admits by estimated frequency."""

from kv_pool.core.cache_policy import CachedRun, CachePolicy


class WTinyLFU(CachePolicy):
    """New runs pass a window of 1 %, then displace the next victim of a segmented LRU if used more often.

    Queues: window, probation, protected (80 % of the rest). A count-min sketch, halved after uses of ten
    times the capacity. Einziger, Friedman, Manes: TinyLFU: A Highly Efficient Cache Admission Policy, ACM TOS
    2017.
    """

    num_queues = 3

    def start(self) -> None:
        self.counts, self.num_samples, self.is_full = bytearray(8 * self.capacity + 64), 0, False

    def estimate(self, run: CachedRun, change: int = 0) -> int:
        key = hash(run.key)
        cells = [((key >> shift) ^ key) % len(self.counts) for shift in (3, 17, 29, 41)]
        for cell in cells:
            self.counts[cell] = min(self.counts[cell] + change, 15)
        return min([self.counts[cell] for cell in cells])

    def cached(self, run: CachedRun) -> None:
        self.estimate(run, 1)
        self.num_samples += 1
        if self.num_samples >= 10 * self.capacity:
            self.counts = self.counts.translate(bytes(count // 2 for count in range(256)))
            self.num_samples //= 2

    def hit(self, run: CachedRun) -> None:
        self.cached(run)

    def freed(self, run: CachedRun) -> int:
        return 0 if run.queue is None or run.queue.index == 0 else 2

    def choose(self) -> int:
        window, probation, protected = self.queues
        while protected.first is not None and protected.num_blocks > self.capacity * 4 // 5:
            probation.append(protected.first)
        limit = self.capacity // 100
        while window.first is not None and window.num_blocks > limit:
            if self.is_full and probation.first is not None:
                if self.estimate(window.first) <= self.estimate(probation.first):
                    return 0
                limit = self.capacity
            probation.append(window.first)
        self.is_full = True
        return 1 if probation.first is not None else 2 if protected.first is not None else 0
