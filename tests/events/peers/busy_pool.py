"""A pool that serves concurrent requests and publishes events, and the expected results of readers."""

import random

from events.deadlines import wait_until

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request

BLOCK_SIZE = 16
NUM_BLOCKS = 64
MAX_RUNNING = 4


class BusyPool:
    """A pool of 64 blocks of 16 tokens; prompts share prefixes and exceed the pool, so that it evicts."""

    def __init__(self, seed=0):
        self.rng = random.Random(seed)
        self.pool = BlockPool(NUM_BLOCKS, True, BLOCK_SIZE, enable_kv_cache_events=True)
        self.manager = KVCacheManager(self.pool)
        self.hasher = BlockHasher("sha256_cbor", block_size=BLOCK_SIZE)
        self.roots = [self.make_tokens(4) for _ in range(3)]
        self.prompts = [root + self.make_tokens(2) for root in self.roots for _ in range(3)]
        self.running = []
        self.number = 0
        self.num_batches = 0
        self.num_evicted = 0

    def make_tokens(self, num_blocks):
        return [self.rng.randrange(30_000) for _ in range(num_blocks * BLOCK_SIZE)]

    def serve(self, publisher, num_requests):
        """Serve requests; publish one batch of events after each."""
        for _ in range(num_requests):
            self.number += 1
            tokens = self.rng.choice(self.prompts) + self.make_tokens(1) + [self.rng.randrange(30_000)] * 5
            self.prompts.append(tokens) if self.rng.random() < 0.4 and len(tokens) < 192 else None
            request = Request(f"r{self.number}", tokens, self.hasher)
            prefix = self.manager.get_computed_blocks(request)
            wanted = request.num_tokens - prefix.num_tokens
            while self.manager.allocate_slots(request, wanted, prefix) is None:
                self.finish_one()
                prefix = self.manager.get_computed_blocks(request)
                wanted = request.num_tokens - prefix.num_tokens
            self.running.append(request)
            if len(self.running) > MAX_RUNNING:
                self.finish_one()
            self.publish(publisher)
        wait_until(lambda: count_full_batches(publisher.get_statistics()) >= self.num_batches, "sent")

    def finish_one(self):
        self.manager.free(self.running.pop(self.rng.randrange(len(self.running))))

    def publish(self, publisher):
        events = self.manager.take_events()
        self.num_evicted += sum(type(event).__name__ == "BlockRemoved" for event in events)
        if events:
            publisher.publish(events)
            self.num_batches += 1

    def reset(self, publisher):
        """Free all requests and evict all cached blocks."""
        while self.running:
            self.finish_one()
        assert self.manager.reset_prefix_cache()
        self.publish(publisher)

    def count_overlaps(self):
        """Return the number of leading blocks of each prompt in the pool's map."""
        return [self.count_overlap(prompt) for prompt in self.prompts]

    def count_overlap(self, prompt):
        hashes = Request("asks", prompt, self.hasher).block_hashes
        for number, block_hash in enumerate(hashes):
            if self.pool.get_cached_block(block_hash, [0]) is None:
                return number
        return len(hashes)


def count_full_batches(statistics):
    return statistics.num_batches_sent - statistics.num_empty_batches_sent
