"""`MQ`: queues by frequency, with a lifetime in each."""

from typing import Final

from kv_pool.core.cache_policy import STAY, CachedRun, CachePolicy, Ghosts

NUM_QUEUES: Final = 8
LIFETIME: Final = 10_000


class MQ(CachePolicy):
    """Queue k has the runs with 2**k uses and more; a run not used for the lifetime moves down by one queue.

    Ghosts for four times the capacity remember the uses. The lifetime is 10,000 uses of runs. Zhou, Philbin,
    Li: The Multi-Queue Replacement Algorithm for Second Level Buffer Caches, USENIX ATC 2001. Needs no hints.
    """

    num_queues = NUM_QUEUES

    def start(self) -> None:
        self.now, self.ghosts = 0, Ghosts(4 * self.capacity)
        self.uses: dict[bytes, int] = {}
        self.returning: dict[bytes, int] = {}  # the uses of the ghost that was missed last

    def missed(self, key: bytes) -> None:
        if self.ghosts.pop(key):
            self.returning = {key: self.uses.pop(key)}

    def cached(self, run: CachedRun) -> None:
        run.count = 1 + self.returning.pop(run.key, 0)

    def freed(self, run: CachedRun) -> int:
        self.queues[min((run.count + run.num_hits).bit_length(), NUM_QUEUES) - 1].append(run)
        run.stamp = self.now + LIFETIME
        self.now += 1
        for level in range(1, NUM_QUEUES):
            if (oldest := self.queues[level].first) is not None and oldest.stamp < self.now:
                oldest.stamp = self.now + LIFETIME
                self.queues[level - 1].append(oldest)
        return STAY

    def choose(self) -> int:
        level = 0
        while self.queues[level].first is None:
            level += 1
        return level

    def evicted(self, run: CachedRun, num_blocks: int) -> None:
        key = run.get_tail_key(num_blocks)
        self.uses[key] = run.count + run.num_hits
        for dropped in self.ghosts.add(key, num_blocks):
            self.uses.pop(dropped, None)
