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

    def freed(self, run: CachedRun) -> int:
        seconds = run.hints.get("ttl_s", 0.0) if run.hints is not None else 0.0
        run.value = self.clock() + seconds
        return min(1 + int(seconds).bit_length(), NUM_CLASSES - 1) if seconds > 0 else 0

    def choose(self) -> int:
        now = self.clock()
        for index in range(NUM_CLASSES - 1, 0, -1):
            run = self.queues[index].first
            if run is not None and run.value <= now:
                return index
        return next(index for index in range(NUM_CLASSES) if self.queues[index].first is not None)
