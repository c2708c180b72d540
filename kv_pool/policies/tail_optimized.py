"""`TailOptimizedLRU`: evict first what a conversation can recompute within its latency budget."""

from kv_pool.core.cache_policy import CachedRun, CachePolicy

BUDGET_TOKENS = 2048


class TailOptimizedLRU(CachePolicy):
    """LRU, but runs within the last 2,048 tokens of a sequence go first: they can be computed in time.

    Evicting them leaves the next turn's number of missing tokens, and so the tail of the time to first token,
    within a budget. Hint `budget_tokens` sets it per request. Zhang et al.: Tail-Optimized Caching for LLM
    Inference, 2025.
    """

    num_queues = 2
    needs = "kv_hints['budget_tokens'], optional: tokens that a turn may recompute"

    def start(self) -> None:
        self.request_id: object = None
        self.num_tokens = 0  # of the sequence that is being freed

    def freed(self, run: CachedRun) -> int:
        if run.request_id != self.request_id or run.num_children == 0:
            self.request_id, self.num_tokens = run.request_id, run.position + run.num_tokens
        budget = run.hints.get("budget_tokens", BUDGET_TOKENS) if run.hints is not None else BUDGET_TOKENS
        return 0 if self.num_tokens - run.position <= budget and run.num_hits == 0 else 1

    def choose(self) -> int:
        return 1 if self.queues[0].first is None else 0
