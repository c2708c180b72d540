"""`SlowTiers`: a slow model of `TieredCache`, made of lists of keys."""

from kv_pool.tiers.tier import TierStack
from kv_pool.tiers.tiered_cache import TieredCache


class SlowTiers:
    """The keys of each tier, the most recently used last; the pending keys; the keys that plans hold."""

    def __init__(self, *capacities):
        self.capacities = capacities
        self.tiers = [[] for _ in capacities]
        self.pending = []
        self.held = []

    def store(self, level, keys):
        tier = self.tiers[level]
        known = [key for key in keys if key in tier]
        new = list(dict.fromkeys(key for key in keys if key not in tier))
        for key in known:
            tier.remove(key)
            tier.append(key)
        capacity = self.capacities[level]
        for start in range(0, len(new), capacity):
            some = new[start : start + capacity]
            num_missing = max(0, len(tier) + len(some) - capacity)
            outgoing = [key for key in tier if key not in self.held][:num_missing]
            if outgoing and level + 1 < len(self.tiers):
                self.store(level + 1, outgoing)
            for key in outgoing:
                tier.remove(key)
            tier += some[: capacity - len(tier)]

    def flush(self):
        pending, self.pending = self.pending, []
        self.store(0, pending)

    def hold(self, keys):
        self.held += keys
        for tier in self.tiers:
            for key in keys:
                if key in tier:
                    tier.remove(key)
                    tier.append(key)

    def release(self, keys):
        for key in keys:
            self.held.remove(key)

    def forget(self, keys):
        self.pending = [key for key in self.pending if key not in keys]
        for level, tier in enumerate(self.tiers):
            self.tiers[level] = [key for key in tier if key not in keys]

    def clear(self):
        self.pending = []
        self.tiers = [[] for _ in self.tiers]


class WatchedCache(TieredCache):
    """A `TieredCache` that forwards its notifications to a model, if it has one."""

    model = None

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._stack = WatchedStack(self)

    def on_blocks_reused(self, blocks):
        if self.model is not None:
            for block in blocks:  # of two copies, the most recently used one counts
                key = block.block_hash
                self.model.pending = [other for other in self.model.pending if other != key] + [key]
        super().on_blocks_reused(blocks)

    def on_cache_reset(self):
        if self.model is not None:
            self.model.clear()
        super().on_cache_reset()

    def flush_evicted(self):
        if self.model is not None:
            self.model.flush()
        super().flush_evicted()

    def _forget(self, keys):
        if self.model is not None:
            self.model.forget(keys)
        super()._forget(keys)

    def load(self, keys, block_ids):
        failed = super().load(keys, block_ids)
        if self.model is not None:
            # The cache has removed unreadable blocks; the model does not know them.
            for level, tier in enumerate(self.tiers):
                self.model.tiers[level] = [
                    key for key in self.model.tiers[level] if key in tier or key not in keys
                ]
        return failed


class WatchedStack(TierStack):
    """A `TierStack` that forwards holds to the model of its cache, if it has one."""

    def __init__(self, cache):
        super().__init__(cache.tiers, cache._events)
        self.cache = cache

    def hold(self, keys):
        if self.cache.model is not None:
            self.cache.model.hold(keys)
        super().hold(keys)

    def release(self, keys):
        if self.cache.model is not None:
            self.cache.model.release(keys)
        super().release(keys)
