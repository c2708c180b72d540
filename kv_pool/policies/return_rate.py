"""`ReturnRate`: evict what is worth least per block and time, by learned return times."""

from kv_pool.core.cache_policy import CachedRun, CachePolicy
from kv_pool.core.evicted_runs import EvictedRuns
from kv_pool.core.return_times import NUM_AGES, ReturnTimes

NUM_CLASSES = 8
LOSS_SHARE = 0.0003


class ReturnRate(CachePolicy):
    """Keep the runs that promise the most hits per block and second; while that loses against LRU, be LRU.

    Queues by class and age. The class is the time that a run took to return last, 0 for a new run. Returns of
    cached and of evicted runs give the rate of return by class and age, and from these the Gittins index: the
    most returns per block and second that keeping a run can give. The policy counts, with the blocks freed
    since as reuse distance, which returns LRU would have hit; while too many are lost, or little is learned,
    it evicts in LRU order. Ages are in seconds, relative to the time in which the pool was filled.

    Ideas: ages and classes from Beckmann, Chen, Cidon: LHD, NSDI 2018, and Beckmann, Sanchez: EVA, HPCA 2017;
    the index from Gittins, 1979; return intervals from Jiang, Zhang: LIRS, SIGMETRICS 2002. Needs no hints.
    """

    num_queues = NUM_CLASSES * NUM_AGES

    def start(self) -> None:
        self.returns = ReturnTimes(self.capacity, NUM_CLASSES)
        self.evictions = EvictedRuns(self.capacity)
        self.start_time: float | None = None  # of the first new run
        self.order = list(range(NUM_CLASSES * NUM_AGES))  # queues by value, the first to evict from first
        self.next_update = 0
        self.gain = 0  # blocks hit here, less the blocks that LRU would have hit
        self.is_lru = False
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
        run.stamp = self.returns.enter(self.read_time(), run.count, run.num_blocks)
        run.value = self.read_time()
        return run.count * NUM_AGES

    def find_evicted(self, run: CachedRun) -> None:
        """Note the returns of evicted runs whose blocks a new run has. One lookup for each, and one more."""
        evicted = self.evictions
        position = 0
        while position < run.num_blocks and evicted.pop(run.blocks[position].key):
            stamp, kind = evicted.found_stamp, evicted.found_kind
            num_back = min(evicted.found_blocks, run.num_blocks - position)
            self.returns.leave(stamp, kind, evicted.found_blocks - num_back)
            count = self.note_return(stamp, kind, run.value - evicted.found_time, num_back, False)
            run.count = count if position == 0 else run.count
            position += num_back

    def note_return(self, stamp: int, kind: int, seconds: float, num_blocks: int, is_hit: bool) -> int:
        """Learn from the return of blocks. Return their new class."""
        distance = self.returns.leave(stamp, kind, num_blocks) + num_blocks
        if not self.returns.bounds:
            return 1
        self.gain += num_blocks * (int(is_hit) - int(distance <= self.capacity))
        self.returns.note_return(kind, seconds, num_blocks)
        return 1 + self.returns.find_age(seconds) * (NUM_CLASSES - 1) // NUM_AGES

    def choose(self) -> int:
        if self.returns.num_entered >= self.next_update:
            self.next_update = self.returns.num_entered + self.capacity // 16
            self.update(self.read_time())
        queues = self.queues
        if not self.is_lru:
            for index in self.order:
                if queues[index].first is not None:
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
        allowed = LOSS_SHARE * returns.num_entered + self.capacity / 32
        self.is_lru = self.gain < (-allowed / 2 if self.is_lru else -allowed)
        self.is_lru |= returns.num_entered < 2 * self.capacity
        returns.update_values()
        ranked = [(value, -index) for index, value in enumerate(returns.values)]
        ranked.sort()
        self.order = [-index for _, index in ranked]
        for index in range(len(self.queues) - 1, -1, -1):
            kind, age = index // NUM_AGES, index % NUM_AGES
            run = self.queues[index].first
            while run is not None and age + 1 < NUM_AGES and now - run.value >= returns.bounds[age + 1]:
                self.queues[kind * NUM_AGES + returns.find_age(now - run.value)].append(run)
                run = self.queues[index].first

    def evicted(self, run: CachedRun, num_blocks: int) -> None:
        key, evicted = run.get_tail_key(num_blocks), self.evictions
        is_same = run is self.cut_run and evicted.pop(self.cut_key)
        self.cut_run, self.cut_key = run, key
        num_blocks += evicted.found_blocks if is_same else 0
        if evicted.add(key, run.stamp, run.value, run.count, num_blocks):
            self.returns.leave(evicted.found_stamp, evicted.found_kind, evicted.found_blocks)
