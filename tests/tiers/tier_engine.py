"""A test engine with real tiers; the KV of a token is a number that depends on all tokens before it."""

import numpy as np
from tiers.swap_engine import HASH_BLOCK_SIZE, HASHER, ComputingEngine

from kv_pool import BlockPool, KVCacheManager
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.host_tier import HostTier
from kv_pool.tiers.onboarder import TierOnboarder
from kv_pool.tiers.tiered_cache import TieredCache


class TierEngine(ComputingEngine):
    """A manager, its tiers and the bytes; computes tokens in steps and verifies what it wrote.

    A step: `start` and `grow` some requests, then `run`, which flushes, copies and writes.
    """

    cache_type = TieredCache

    def __init__(
        self,
        folder,
        num_blocks=8,
        num_host_blocks=6,
        num_disk_blocks=12,
        groups=None,
        events=False,
        **options,
    ):
        groups = [FullAttentionSpec(block_size=HASH_BLOCK_SIZE)] if groups is None else groups
        self.pool = BlockPool(num_blocks + 1, True, HASH_BLOCK_SIZE, events)
        kv = np.zeros((num_blocks + 1, max(spec.block_size for spec in groups)), np.uint64)
        super().__init__(KVCacheManager(self.pool, groups=groups), kv)
        self.device = BlockStorage.wrap_state([self.kv])
        self.layout = BlockLayout.describe(self.device, HASH_BLOCK_SIZE, HASHER)
        self.folder = folder
        self.num_host_blocks, self.num_disk_blocks = num_host_blocks, num_disk_blocks
        self.options = {"enable_events": events, **options}
        self.scheduled = []
        self.open()

    def open(self):
        """Create the pool's tiers: an empty host tier, and a disk tier with the folder's blocks."""
        tiers = [HostTier(self.num_host_blocks, self.device)]
        if self.num_disk_blocks:
            tiers.append(DiskTier(self.folder, self.num_disk_blocks, self.layout))
        self.cache = self.cache_type(self.pool, self.device, tiers, **self.options)
        self.onboarder = TierOnboarder(self.manager, self.cache)

    def restart_tiers(self):
        self.cache.flush()
        self.cache.close()
        self.open()

    # ---- a step ----------------------------------------------------------------------------------

    def start(self, request, num_new_tokens=None, **options):
        """Admit a request. Return its tokens from the device and from tiers; None if blocks are short."""
        found = self.onboarder.admit(request, num_new_tokens, **options)
        if found is None:
            return None
        num_left = request.num_tokens - request.num_computed_tokens
        self.schedule(request, num_left if num_new_tokens is None else min(num_new_tokens, num_left))
        num_on_device = found.pop("GPU")
        return num_on_device, sum(found.values())

    def grow(self, request, num_new_tokens, **options):
        """Allocate slots for more tokens of a running request. Return False if blocks are short."""
        if self.manager.allocate_slots(request, num_new_tokens, **options) is None:
            return False
        self.schedule(request, num_new_tokens)
        return True

    def schedule(self, request, num_new_tokens):
        self.scheduled.append((request, request.num_computed_tokens + num_new_tokens))

    def run(self):
        """Run a step: flush, make the manager's copies, write."""
        self.cache.flush()
        self.device.apply_moves(self.manager.take_block_copies())
        for request, end in self.scheduled:
            self.write(request, request.num_computed_tokens, end)
            request.num_computed_tokens = end
        for request, _ in self.scheduled:
            self.promise(request)
            self.check(request)
            self.manager.cache_blocks(request, request.num_computed_tokens)
        self.scheduled = []

    def compute(self, *requests):
        """Start these requests and compute all their tokens in one step."""
        found = [self.start(request) for request in requests]
        self.run()
        return found[0] if len(found) == 1 else found

    def damage(self, key):
        """Flip a byte of a block on disk."""
        slot = self.cache.tiers[1]._slot_of[key]
        with open(self.folder / "blocks", "r+b") as file:
            file.seek(slot * 4096)
            first = file.read(1)
            file.seek(slot * 4096)
            file.write(bytes([first[0] ^ 255]))

    # ---- reading ---------------------------------------------------------------------------------

    def check_cached(self, damaged=()):
        """Verify the content of all cached blocks, on the device and in tiers, except damaged ones."""
        self.check_promised(self.pool, self.kv)
        for tier in self.cache.tiers:
            keys = [key for key in tier.list_keys() if key not in damaged]
            read = tier.read(keys)
            assert not read.failed
            content = np.zeros((len(keys) + 1, self.kv.shape[1]), np.uint64)
            moves = list(zip(read.block_ids, range(len(keys)), strict=True))
            read.storage.copy_to(BlockStorage.wrap_state([content]), moves)
            for key, row in zip(keys, content, strict=False):
                promised = self.promised[key]
                assert row[: len(promised)].tolist() == promised, (tier.medium, key)

    def keys_of(self, request, group_id=0):
        """Return the keys of the request's full blocks in a group."""
        stride = self.groups[group_id].stride
        return [
            make_block_hash_with_group_id(block_hash, group_id)
            for block_hash in request.block_hashes[stride - 1 :: stride]
        ]

    def where(self, request):
        """Return a letter for each full block: D for device, H for host, S for storage, - for none."""
        places = []
        for key in self.keys_of(request):
            if self.pool.cached_block_hash_to_block.get_one_block(key) is not None:
                places.append("D")
            else:
                level = self.cache.find_tier(key)
                places.append("-" if level is None else "HS"[level])
        return "".join(places)
