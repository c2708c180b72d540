"""Tenants that send almost equal prompts, and the content of each block that they look up."""

import random

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request, SaltRegion

BLOCK_SIZE = 4


class SaltedTenants:
    """Requests of many tenants over one pool. Each hit is compared with what the block was computed from.

    A content is a number for the tokens of a prefix and the salts on them.

    Attributes:
        num_lookups, num_public_blocks, num_private_blocks: look-ups, and blocks found by them.
        num_foreign_blocks: blocks found that were computed from other tokens or under other salts.
    """

    def __init__(self, seed, num_tenants=256, num_requests=3000, num_blocks=1500, is_salted=True):
        self.rng = random.Random(seed)
        self.manager = KVCacheManager(BlockPool(num_blocks, True, BLOCK_SIZE))
        self.contents = {}
        self.block_contents = {}
        self.num_lookups = self.num_public_blocks = self.num_private_blocks = self.num_foreign_blocks = 0
        hasher = BlockHasher(block_size=BLOCK_SIZE)
        systems = [[system] * self.rng.randrange(2, 22) for system in range(3)]
        self.requests = []
        for number in range(num_requests):
            tokens = [
                *self.rng.choice(systems),
                *(self.rng.randrange(2) for _ in range(self.rng.randrange(20))),
            ]
            regions = self.draw_regions(len(tokens), f"tenant-{self.rng.randrange(num_tenants)}")
            request = Request(str(number), tokens, hasher, salt_regions=regions if is_salted else None)
            self.requests.append((request, self.name_contents(tokens, regions), regions[0].start))

    def draw_regions(self, num_tokens, tenant):
        start = self.rng.randrange(num_tokens)
        regions = [SaltRegion(start, tenant)]
        if self.rng.random() < 0.3:
            regions.append(SaltRegion(start + self.rng.randrange(1, 8), f"user-{self.rng.randrange(3)}"))
        return regions

    def name_contents(self, tokens, regions):
        named = []
        for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            content = (tuple(tokens[:end]), tuple(region for region in regions if region.start < end))
            named.append(self.contents.setdefault(content, len(self.contents)))
        return named

    def run(self, num_lookups, share_of_writes=0.03):
        """Look up random requests, and compute some of them."""
        rng, find, requests = self.rng, self.manager.get_computed_blocks, self.requests
        num_requests = len(requests)
        block_contents = self.block_contents
        for _ in range(num_lookups):
            request, contents, start = requests[int(rng.random() * num_requests)]
            prefix = find(request)
            end = 0
            for block, content in zip(prefix.blocks[0], contents, strict=False):
                end += BLOCK_SIZE
                if block_contents[block.block_id] != content:
                    self.num_foreign_blocks += 1
                if end > start:
                    self.num_private_blocks += 1
                else:
                    self.num_public_blocks += 1
            if rng.random() < share_of_writes:
                self.compute(request, contents, prefix)
        self.num_lookups += num_lookups

    def compute(self, request, contents, prefix):
        manager = self.manager
        manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
        num_found = len(prefix.blocks[0])
        table = manager.get_block_ids(request.request_id)
        for block_id, content in zip(table[num_found:], contents[num_found:], strict=False):
            self.block_contents[block_id] = content
        manager.take_block_copies()
        manager.free(request)
