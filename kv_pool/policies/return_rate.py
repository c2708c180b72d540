"""`ReturnRate`: evict what is worth least per block and time, by learned return times."""

from typing import Final

from kv_pool.core.cache_policy import CachedRun, CachePolicy
from kv_pool.policies._evicted_runs import EvictedRuns
from kv_pool.policies._return_times import NUM_AGES, ReturnTimes

NUM_CLASSES: Final = 8
LOSS_SHARE: Final = 0.0007  # hits that may be lost against LRU, of the blocks freed
LEAST_RISK: Final = 0.2  # assumed share of early evictions that cost a hit
DECAY: Final = 0.989  # of the counts for the risk, per update: half in 64 updates, which are 4 capacities


class ReturnRate(CachePolicy):
    """Keep the runs that promise the most hits per block and second, as long as little is lost against LRU.

    Queues by class and age. The class is the time that a run took to return last, 0 for a new run. Returns
    of cached and of evicted runs give the rate of return by class and age, and from these the Gittins index:
    the most returns per block and second that keeping a run can give. Ages are in seconds, relative to the
    time in which the pool was filled.

    The policy counts, with the blocks freed since as reuse distance, which returns LRU would have hit. The
    eviction of a block that LRU would still have is early, and may cost a hit. Early evictions are allowed
    while the hits lost so far, and those expected to be lost to early evictions, are a small share of the
    freed blocks. Otherwise blocks that LRU would have evicted before are, or else the least recently freed.

    Ideas: ages and classes from Beckmann, Chen, Cidon: LHD, NSDI 2018, and Beckmann, Sanchez: EVA, HPCA 2017;
    the index from Gittins, 1979; return intervals from Jiang, Zhang: LIRS, SIGMETRICS 2002. Needs no hints.
    """

    num_queues = NUM_CLASSES * NUM_AGES

    def start(self) -> None:
        self.returns = ReturnTimes(self.capacity, NUM_CLASSES)
        self.evictions = EvictedRuns(self.capacity)
        self.start_time: float | None = None  # of the first new run
        # Queues by value, the first to evict from first; without those that are empty until the next update.
        self.order = list(range(NUM_CLASSES * NUM_AGES))
        self.next_update = 0
        self.gain = 0  # blocks hit here, less the blocks that LRU would have hit
        self.is_learning = True
        # Blocks that LRU would still have were freed after this stamp; how many of them are evicted; and,
        # decaying, how many blocks were evicted early, and the hits of LRU less those here.
        self.early_stamp = 0
        self.num_early = 0
        self.sum_early = 0.0
        self.sum_lost = 0.0
        self.cut_run: CachedRun | None = None  # the run that was evicted from last, and the key remembered
        self.cut_key: object = None

    def read_time(self) -> float:
        """Return the seconds, and a microsecond for each freed block: time passes without a clock, too."""
        return self.clock() + 1e-6 * self.returns.num_entered

    def cached(self, run: CachedRun) -> None:
        run.value = self.read_time()
        if self.start_time is None:
            self.start_time = run.value

    def hit(self, run: CachedRun) -> None:
        if run.stamp:
            seconds = self.read_time() - run.value
            run.count = self.note_return(run.stamp, run.count, seconds, run.num_blocks, True)
            run.stamp = 0

    def freed(self, run: CachedRun) -> int:
        if run.stamp:
            self.returns.leave(run.stamp, run.count, run.num_blocks)
        elif run.queue is None:
            self.find_evicted(run)
        now = self.clock()  # once, for both times
        run.stamp = self.returns.enter(now + 1e-6 * self.returns.num_entered, run.count, run.num_blocks)
        run.value = now + 1e-6 * self.returns.num_entered
        return run.count * NUM_AGES

    def find_evicted(self, run: CachedRun) -> None:
        """Note the returns of evicted runs whose blocks a new run has. One lookup for each, and one more."""
        evicted = self.evictions
        position = 0
        while position < run.num_blocks and (found := evicted.pop(run.blocks[position].key)) is not None:
            stamp, time, kind, num_blocks = found
            num_back = min(num_blocks, run.num_blocks - position)
            self.returns.leave(stamp, kind, num_blocks - num_back, True)
            count = self.note_return(stamp, kind, run.value - time, num_back, False)
            if stamp > self.early_stamp:
                self.num_early -= num_blocks
            run.count = count if position == 0 else run.count
            position += num_back

    def note_return(self, stamp: int, kind: int, seconds: float, num_blocks: int, is_hit: bool) -> int:
        """Learn from the return of blocks. Return their new class."""
        distance = self.returns.leave(stamp, kind, num_blocks, not is_hit) + num_blocks
        if not self.returns.bounds:
            return 1
        gain = num_blocks * (int(is_hit) - int(distance <= self.capacity))
        self.gain += gain
        self.sum_lost -= gain
        age = self.returns.note_return(kind, seconds, num_blocks)
        return 1 + age * (NUM_CLASSES - 1) // NUM_AGES

    def choose(self) -> int:
        if self.returns.num_entered >= self.next_update:
            self.next_update = self.returns.num_entered + self.capacity // 16
            self.update(self.read_time())
        queues = self.queues
        if not self.is_learning:
            risk = min(1.0, max(LEAST_RISK, (self.sum_lost + 8.0) / (self.sum_early + 64.0)))
            may_lose = self.gain - risk * self.num_early > -LOSS_SHARE * self.returns.num_entered
            for index in self.order:
                run = queues[index].first
                if run is not None and (may_lose or run.stamp <= self.early_stamp):
                    return index
        best, oldest = -1, 0
        for queue in queues:
            run = queue.first
            if run is not None and (best < 0 or run.stamp < oldest):
                best, oldest = queue.index, run.stamp
        return best

    def update(self, now: float) -> None:
        """Sort the queues by value, move runs to the queues of their ages, and compare the gain with LRU."""
        returns = self.returns
        if not returns.bounds:
            returns.set_scale(max(now - (self.start_time or 0.0), 1e-6))
        self.is_learning = returns.num_entered < self.capacity
        self.early_stamp, self.num_early = returns.count_recent(self.capacity)
        self.sum_early *= DECAY
        self.sum_lost *= DECAY
        for index in range(len(self.queues) - 1, -1, -1):
            kind, age = index // NUM_AGES, index % NUM_AGES
            run = self.queues[index].first
            while run is not None and age + 1 < NUM_AGES and now - run.value >= returns.bounds[age + 1]:
                self.queues[kind * NUM_AGES + returns.find_age(now - run.value)].append(run)
                run = self.queues[index].first
        returns.update_values()
        ranked: list[tuple[float, int]] = []
        for queue in self.queues:
            run = queue.first
            if run is not None:
                ranked.append((returns.read_value(queue.index, now - run.value), -queue.index))
            elif queue.num_blocks > 0 or queue.index % NUM_AGES == 0:
                ranked.append((returns.values[queue.index], -queue.index))
        ranked.sort()
        self.order = [-index for _, index in ranked]

    def evicted(self, run: CachedRun, num_blocks: int) -> None:
        key, evicted, num_new = run.get_tail_key(num_blocks), self.evictions, num_blocks
        cut = evicted.pop(self.cut_key) if run is self.cut_run else None
        self.cut_run, self.cut_key = run, key
        num_blocks += 0 if cut is None else cut[3]
        self.returns.note_evicted(run.stamp, num_new)
        if run.stamp > self.early_stamp:
            self.num_early += num_new
            self.sum_early += num_new
        forgotten = evicted.add(key, run.stamp, run.value, run.count, num_blocks)
        if forgotten is not None:
            self.returns.leave(forgotten[0], forgotten[2], forgotten[3], True)
