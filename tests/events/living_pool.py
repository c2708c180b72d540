"""A pool with random requests, as a source of events."""

import random

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request


class LivingPool:
    """A pool that serves requests with a few shared prompts, with evictions and occasional resets."""

    def __init__(self, seed=0, num_blocks=40):
        self.rng = random.Random(seed)
        self.pool = BlockPool(num_blocks, True, 4, enable_kv_cache_events=True)
        self.manager = KVCacheManager(self.pool)
        self.hasher = BlockHasher("sha256_cbor", block_size=4)
        self.prompts = [[self.rng.randrange(1000) for _ in range(16)] for _ in range(6)]
        self.number = 0

    def step(self):
        """Serve one request; return its events. There are always some, since its last tokens are new."""
        self.number += 1
        if self.rng.random() < 0.02:
            self.pool.reset_prefix_cache()
        tokens = self.rng.choice(self.prompts) + [self.rng.randrange(1000) for _ in range(8)]
        request = Request(f"r{self.number}", tokens, self.hasher)
        prefix = self.manager.get_computed_blocks(request)
        wanted = request.num_tokens - prefix.num_tokens
        if self.manager.allocate_slots(request, wanted, prefix) is not None:
            self.manager.free(request)
        return self.manager.take_events()
