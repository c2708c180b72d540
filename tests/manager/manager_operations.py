"""`ManagerSide`: one implementation's manager and its requests, driven by operations; and its state as text.

Blocks are named by their ids; the null block is 0. Hashes are named after the first request that had them, so
that implementations may hash with different bytes.
"""

from abc import abstractmethod

import msgspec
from core.plain_operations import Side

NUM_GROUP_BYTES = 4  # at the end of a key


class ManagerSide(Side):
    def __init__(self, classes, options):
        super().__init__(classes)
        self.options = options
        self.requests = {}
        self.prefixes = {}
        self.hash_names = {}
        self.retained = []
        self.has_rules = options["rules"] is not None
        self.manager = self.make_manager(options)
        self.pool = self.manager.block_pool

    @abstractmethod
    def make_manager(self, options): ...

    @abstractmethod
    def make_request(self, request_id, token_ids): ...

    # ---- requests ----------------------------------------------------------------------------------

    def request(self, request_id, token_ids):
        self.requests[request_id] = self.make_request(request_id, token_ids)
        self.name_hashes(request_id)

    def append(self, request_id, token_ids):
        self.requests[request_id].append_output_token_ids(list(token_ids))
        self.name_hashes(request_id)

    def name_hashes(self, request_id):
        for number, block_hash in enumerate(self.requests[request_id].block_hashes):
            self.hash_names.setdefault(block_hash, (request_id, number))

    def count_computed(self, request_id, num_tokens):
        self.requests[request_id].num_computed_tokens += num_tokens

    def forget(self, request_id):
        del self.requests[request_id]

    @abstractmethod
    def begin_step(self):
        """Take the copies to make, free their blocks, and begin a step; return the copies."""

    @abstractmethod
    def take_copies(self):
        """Take the copies to make, and keep their blocks; return the copies."""

    def free_copied(self):
        """Free the blocks of the copies taken by `take_copies`."""
        self.pool.free_blocks(self.retained)
        self.retained = []

    # ---- the manager -------------------------------------------------------------------------------

    def evict_blocks(self, block_ids):
        self.manager.block_pool.evict_blocks(set(block_ids))  # as vLLM's manager

    def reset_prefix_cache(self):
        return self.manager.reset_prefix_cache()

    def cache_blocks(self, request_id, num_computed_tokens):
        self.manager.cache_blocks(self.requests[request_id], num_computed_tokens)

    def free(self, request_id):
        self.manager.free(self.requests[request_id])
        self.requests[request_id].num_computed_tokens = 0

    def take_events(self):
        return [self.name_event(msgspec.to_builtins(event)) for event in self.manager.take_events()]

    def name_event(self, event):
        if self.options["algorithm"] == "sha256_cbor":  # the same bytes in both implementations
            return event
        return [type(event).__name__, len(event)]

    # ---- visible state ---------------------------------------------------------------------------

    def list_cached(self):
        """Return the block ids by key: of full blocks, with rules also of partial ones."""
        cache = self.pool.cached_block_hash_to_block._cache
        cached = {}
        for key, stored in cache.items():
            group_id = int.from_bytes(key[-NUM_GROUP_BYTES:], "big")
            request_id, number = self.hash_names[key[:-NUM_GROUP_BYTES]]
            stride = self.options["groups"][group_id]["block_size"] // self.options["hash_block_size"]
            if self.has_rules or (number + 1) % stride == 0:
                cached[f"{request_id}:{number} of group {group_id}"] = sorted(ids_of(stored))
        return cached

    def picture(self):
        return {
            "tables": {request_id: self.table_ids(request_id) for request_id in self.requests},
            "free": [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()],
            "num_free": self.pool.get_num_free_blocks(),
            "usage": self.manager.usage,
            "cached": self.list_cached(),
            "covered": self.list_covered() if self.has_rules else [],
        }

    def list_covered(self):
        """Return each cached block's id with the number of tokens that its primary key covers."""
        return [
            [block.block_id, block.block_hash_num_tokens]
            for block in self.pool.blocks
            if block.block_hash is not None
        ]

    @abstractmethod
    def table_ids(self, request_id): ...


def ids_of(stored):
    return list(stored) if isinstance(stored, dict) else [stored.block_id]


def ids(blocks):
    return [block.block_id for block in blocks]


def per_group(answer, num_groups):
    """Return the ids of the new blocks, one list per group."""
    groups = [ids(blocks) for blocks in answer]
    return groups or [[] for _ in range(num_groups)]
