"""`TTL`: keep what a tool call will come back for."""

from kv_pool.core.cache_policy import CachedRun, CachePolicy

NUM_CLASSES = 16


class TTL(CachePolicy):
    """Runs whose last request expects another turn are kept for a time to live, others in LRU order.

    Hint `ttl_s`: seconds until the tool's answer is expected to be back. One queue per power of two of the
    time, and queue 0 for runs without it; among runs still in time, the shortest time to live is evicted
    first. As in Li et al.: Continuum: Efficient and Robust Multi-Turn LLM Agent Scheduling with KV Cache
    Time-to-Live, 2025.
    """

    num_queues = NUM_CLASSES
    needs = "kv_hints['ttl_s'], seconds, on requests that end with a tool call"

    def start(self) -> None:
        self.highest = 0  # the highest queue used so far

    def freed(self, run: CachedRun) -> int:
        seconds = run.hints.get("ttl_s", 0.0) if run.hints is not None else 0.0
        if not seconds > 0:
            return 0
        run.value = self.clock() + seconds
        index = min(1 + int(seconds).bit_length(), NUM_CLASSES - 1)
        self.highest = max(self.highest, index)
        return index

    def choose(self) -> int:
        now = self.clock() if self.highest else 0.0
        shortest = 0
        for index in range(self.highest, 0, -1):
            run = self.queues[index].first
            if run is not None:
                if run.value <= now:
                    return index
                shortest = index
        return shortest if self.queues[0].first is None else 0
