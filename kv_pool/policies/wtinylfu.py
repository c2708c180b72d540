"""`WTinyLFU`: a window, and a main part that admits by estimated frequency."""

from kv_pool.core.cache_policy import CachedRun, CachePolicy


class WTinyLFU(CachePolicy):
    """New runs pass a window of 1 %, then displace the next victim of a segmented LRU if used more often.

    Queues: window, probation, protected (80 %). A count-min sketch is halved every ten capacities. Einziger,
    Friedman, Manes: TinyLFU: A Highly Efficient Cache Admission Policy, ACM TOS 2017. Needs no hints.
    """

    num_queues = 3

    def start(self) -> None:
        self.counts, self.num_samples, self.is_full = bytearray(8 * self.capacity + 64), 0, False

    def find_cells(self, run: CachedRun) -> list[int]:
        if run.tag is None or run.tag[0] is not run.key:
            key = int.from_bytes((run.key or b"")[-12:-4], "big") * 0x9E3779B97F4A7C15 % 2**64
            run.tag = (run.key, [((key >> shift) ^ key) % len(self.counts) for shift in (3, 17, 29, 41)])
        cells: list[int] = run.tag[1]
        return cells

    def estimate(self, run: CachedRun) -> int:
        return min([int(self.counts[cell]) for cell in self.find_cells(run)])

    def cached(self, run: CachedRun) -> None:
        for cell in self.find_cells(run):
            self.counts[cell] = min(self.counts[cell] + 1, 15)
        self.num_samples += 1
        if self.num_samples >= 10 * self.capacity:
            self.counts = self.counts.translate(bytes(count // 2 for count in range(256)))
            self.num_samples //= 2

    def hit(self, run: CachedRun) -> None:
        self.cached(run)

    def freed(self, run: CachedRun) -> int:
        return 0 if run.queue is None or run.queue.index == 0 else 2

    def choose(self) -> int:
        limit, (window, probation, protected) = self.capacity // 100, self.queues
        while protected.first is not None and protected.num_blocks > self.capacity * 4 // 5:
            probation.append(protected.first)
        while window.first is not None and window.num_blocks > limit:
            if self.is_full and (victim := probation.first) is not None:
                if self.estimate(window.first) <= self.estimate(victim):
                    return 0
                limit = self.capacity
            probation.append(window.first)
        self.is_full = True
        return 1 if probation.first is not None else 2 if protected.first is not None else 0
