"""An engine whose KV is one number per token, derived from all tokens before it, in two real storages."""

import zlib

import numpy as np

from kv_pool import BlockHasher, BlockPool, BlockRetention, CopyFailedError, KVCacheManager, Request
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, MambaSpec
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.swapper import BlockSwapper

HASH_BLOCK_SIZE = 4
HASHER = BlockHasher("sha256", "s", HASH_BLOCK_SIZE)


class SwapEngine:
    """A manager, a swapper, and the bytes of both pools; computes tokens and reads back what it wrote."""

    def __init__(
        self,
        num_blocks=8,
        num_host_blocks=8,
        groups=None,
        events=False,
        caching=True,
        has_retention=False,
        **options,
    ):
        groups = [FullAttentionSpec(block_size=HASH_BLOCK_SIZE)] if groups is None else groups
        pool = BlockPool(num_blocks + 1, caching, HASH_BLOCK_SIZE, events)
        host_pool = BlockPool(num_host_blocks + 1, caching, HASH_BLOCK_SIZE, events, medium="CPU")
        retention = BlockRetention(pool, lambda: 0.0) if has_retention else None
        self.manager = KVCacheManager(pool, groups=groups, retention=retention, **options)
        self.swapper = BlockSwapper(self.manager, host_pool)
        num_slots = max(spec.block_size for spec in groups)
        self.device_kv = np.zeros((num_blocks + 1, num_slots), np.uint64)
        self.host_kv = np.zeros((num_host_blocks + 1, num_slots), np.uint64)
        self.device = BlockStorage.wrap_state([self.device_kv])
        self.host = BlockStorage.wrap_state([self.host_kv])
        self.promised = {}  # key of the prefix map -> expected content of a block with this key

    def make_request(self, name, tokens):
        return Request(name, tokens, HASHER)

    # ---- a step ----------------------------------------------------------------------------------

    def start(self, request, num_new_tokens=None):
        """Look up, allocate and compute; return the prefix's tokens, or None if it does not fit."""
        prefix = self.manager.get_computed_blocks(request)
        num_new = request.num_tokens - prefix.num_tokens if num_new_tokens is None else num_new_tokens
        if self.manager.allocate_slots(request, num_new, prefix) is None:
            return None
        self.compute(request, prefix.num_tokens, prefix.num_tokens + num_new)
        return prefix.num_tokens

    def grow(self, request, num_new_tokens):
        """Compute tokens of a request that holds blocks; return False if they do not fit."""
        if self.manager.allocate_slots(request, num_new_tokens) is None:
            return False
        self.compute(request, request.num_computed_tokens, request.num_computed_tokens + num_new_tokens)
        return True

    def compute(self, request, start, end):
        self.device.apply_moves(self.manager.take_block_copies())
        values = values_of(request)
        for group_id, spec in enumerate(self.manager.groups):
            blocks = self.manager.get_table(request.request_id, group_id).blocks
            if isinstance(spec, MambaSpec):
                if end > start:
                    block = blocks[(end - 1) // spec.block_size]
                    assert not block.is_null
                    self.device_kv[block.block_id] = 0
                    self.device_kv[block.block_id, 0] = values[end - 1] + group_id
                continue
            for position in range(start, end):
                block = blocks[position // spec.block_size]
                assert not block.is_null
                assert block.ref_cnt == 1 or position < start, "written by one alone"
                self.device_kv[block.block_id, position % spec.block_size] = values[position] + group_id
        request.num_computed_tokens = end
        self.promise(request)
        self.check(request)

    def promise(self, request):
        """Record the expected content of blocks with the request's keys."""
        values = values_of(request)
        for group_id, spec in enumerate(self.manager.groups):
            size = spec.block_size
            for position in range(request.num_tokens // size):
                block_hash = request.block_hashes[(position + 1) * size // HASH_BLOCK_SIZE - 1]
                key = make_block_hash_with_group_id(block_hash, group_id)
                row = [value + group_id for value in values[position * size : (position + 1) * size]]
                self.promised[key] = row[-1:] if isinstance(spec, MambaSpec) else row

    # ---- reading back ----------------------------------------------------------------------------

    def check(self, request):
        """Check that every token which the request's next token attends to is in its device blocks."""
        tables = [self.manager.get_table(request.request_id, i) for i in range(len(self.manager.groups))]
        self.check_tables(request, tables, self.device_kv)

    def check_on_host(self, request):
        self.check_tables(request, self.swapper._host._tables[request.request_id], self.host_kv)

    def check_tables(self, request, tables, content):
        num_computed = request.num_computed_tokens
        values = values_of(request)
        for group_id, (group, spec) in enumerate(zip(self.swapper._groups, self.manager.groups, strict=True)):
            blocks = tables[group_id].blocks
            for position in range(group.count_skipped_tokens(num_computed), num_computed):
                block = blocks[position // spec.block_size]
                assert not block.is_null, (request.request_id, group_id, position)
                slot = 0 if isinstance(spec, MambaSpec) else position % spec.block_size
                found = int(content[block.block_id, slot])
                assert found == values[position] + group_id, (request.request_id, group_id, position)

    def check_cached(self):
        """Check that every cached block in either pool holds the content of its key."""
        for pool, content in (
            (self.manager.block_pool, self.device_kv),
            (self.swapper.host_pool, self.host_kv),
        ):
            for block in pool.blocks:
                if block.block_hash is not None:
                    promised = self.promised[block.block_hash]
                    found = content[block.block_id, : len(promised)].tolist()
                    assert found == promised, (pool.medium, block)

    # ---- copying ---------------------------------------------------------------------------------

    def copy(self, plan, moves=None):
        """Make all or some of the plan's copies."""
        source, target = self.device, self.host
        if plan.direction.value != "out":
            source, target = target, source
        source.copy_to(target, plan.moves if moves is None else moves)

    def run(self, plan):
        plan.apply(lambda moves: self.copy(plan, moves))

    def fail(self, plan, num_done=0):
        """Make some of the copies, corrupt the targets of the others, and abort the plan."""

        def break_off(moves):
            self.copy(plan, moves[:num_done])
            content = self.host_kv if plan.direction.value == "out" else self.device_kv
            for move in moves[num_done:]:
                content[move.target] = 2**63
            raise CopyFailedError("broke off")

        plan.apply(break_off)


def values_of(request):
    """Return a number for each token: equal for two requests as long as their tokens are."""
    values, value = [], 0
    for position, token in enumerate(request.all_token_ids):
        value = zlib.crc32(b"%d %d" % (position, token), value)
        values.append(value * 8 + 8)
    return values
