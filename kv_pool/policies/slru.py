"""`SLRU`: segmented least recently used."""

from typing import Final

from kv_pool.core.cache_policy import STAY, CachedRun, CachePolicy

NUM_SEGMENTS: Final = 4


class SLRU(CachePolicy):
    """Segments of equal size; a hit moves a run up by one, and full segments move their oldest runs down.

    New runs start in the lowest segment that has room, so one use does not displace runs that were hit.
    Karedla, Love, Wherry: Caching Strategies to Improve Disk System Performance, Computer 27(3), 1994; with
    four segments: Huang et al.: An Analysis of Facebook Photo Caching, SOSP 2013. Needs no hints.
    """

    num_queues = NUM_SEGMENTS

    def hit(self, run: CachedRun) -> None:
        run.count = 1

    def freed(self, run: CachedRun) -> int:
        size = self.capacity // NUM_SEGMENTS
        queues = self.queues
        queue = run.queue
        if queue is None:
            segment = 0
            while segment < NUM_SEGMENTS and queues[segment].num_blocks + run.num_blocks > size:
                segment += 1
            return segment % NUM_SEGMENTS
        segment = min(queue.index + run.count, NUM_SEGMENTS - 1)
        run.count = 0
        queues[segment].append(run)
        while segment > 0:
            oldest = queues[segment].first
            while queues[segment].num_blocks > size and oldest is not None:
                queues[segment - 1].append(oldest)
                oldest = queues[segment].first
            segment -= 1
        return STAY

    def choose(self) -> int:
        for segment in range(NUM_SEGMENTS):
            if self.queues[segment].first is not None:
                return segment
        return 0
