"""`FIFO`: first in, first out."""

from kv_pool.core.cache_policy import STAY, CachedRun, CachePolicy


class FIFO(CachePolicy):
    """Evict the run that was cached first; hits change nothing. Needs no hints."""

    def freed(self, run: CachedRun) -> int:
        return 0 if run.queue is None else STAY
