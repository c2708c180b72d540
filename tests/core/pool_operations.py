"""`PoolSide`: two pools of one implementation, driven by operations, and a picture of their visible state.

The pool under test is "gpu". "host" is a second pool, as in vLLM's offloading: one list to free may contain
blocks of both, and its events may go to the first pool's queue. Blocks of the first pool are named by their
ids, others "host-3" and "bare-0" (a block made by no pool). Keys and hashes are hex.
"""

import hashlib
from itertools import islice
from types import SimpleNamespace
from typing import ClassVar

import msgspec
from core.plain_operations import Side, hex_of

BARE_IDS = (1, 1001, 1002)  # the first is also the id of a block of the pool
LORA = SimpleNamespace(adapter_id=3, name="a", lora_name="a", lora_path="/p")


class PoolSide(Side):
    # Only errors that vLLM raises before it changes anything.
    EXPECTED_ERRORS: ClassVar = {
        "make_pool": AssertionError,
        "get_new_blocks": ValueError,
        "touch": RuntimeError,
        "unpin_blocks": AssertionError,
        "get_cached_block": OverflowError,
        "cache_full_blocks": AssertionError,
        "cache_partial_block": AssertionError,
        "move_block_hashes": AssertionError,
        "evict_blocks": AssertionError,
    }

    def __init__(self, classes, options):
        super().__init__(classes)
        self.options = options
        self.observed = []  # calls to the observer during the last operation
        self.reused = []  # calls to watchers during the last operation
        self.collector = None
        self.taken = {}
        self.requests = {}
        gpu = self.construct(classes.BlockPool, options["num_blocks"], options["medium"])
        if options["shares_events"]:
            host_class = make_sharing_class(classes.BlockPool)
            host = self.construct(host_class, options["num_host_blocks"], "CPU", event_owner=gpu)
        else:
            host = self.construct(classes.BlockPool, options["num_host_blocks"], "CPU")
        self.pools = {"gpu": gpu, "host": host}
        self.blocks = {block.block_id: block for block in gpu.blocks}
        self.blocks.update((f"host-{block.block_id}", block) for block in host.blocks)
        self.blocks.update(
            (f"bare-{number}", classes.KVCacheBlock(block_id)) for number, block_id in enumerate(BARE_IDS)
        )
        self.bare = [self.blocks[f"bare-{number}"] for number in range(len(BARE_IDS))]
        self.names = {id(block): name for name, block in self.blocks.items()}

    def construct(self, pool_class, num_blocks, medium, **more):
        options = self.options
        observer = None
        if options["observer"] == "recorder":
            observer = Recorder(self)
        elif options["observer"] == "collector" and self.collector is None:
            observer = self.collector = self.classes.KVCacheMetricsCollector(1.0)
        if options["num_lookahead"]:
            more["num_hash_lookahead_tokens"] = options["num_lookahead"]
        return pool_class(
            num_blocks,
            options["caching"],
            options["hash_block_size"],
            enable_kv_cache_events=options["events"],
            metrics_collector=observer,
            medium=medium,
            **more,
        )

    def ignores(self, block):
        """Return True for a null block whose references vLLM counts, as it does until 0.32."""
        return block.is_null and self.options.get("counts_null_references", False)

    def apply(self, operation):
        self.observed.clear()
        self.reused.clear()
        return super().apply(operation)

    def find(self, names):
        return [self.blocks[name] for name in names]

    def name(self, blocks):
        return None if blocks is None else [self.names[id(block)] for block in blocks]

    def name_one(self, block):
        return None if block is None else self.names[id(block)]

    # ---- requests, and pools of other sizes --------------------------------------------------------

    def request(self, spec):
        request = PoolRequest(spec, self.options["hash_block_size"], self.options["num_lookahead"])
        self.requests[spec["number"]] = request
        return hex_of(request.block_hashes[-1]) if request.block_hashes else None

    def grow(self, number, num_tokens):
        self.requests[number].grow(num_tokens)

    def make_pool(self, num_blocks):
        pool = self.classes.BlockPool(num_blocks, True, 4)
        return [pool.num_gpu_blocks, pool.get_num_free_blocks(), pool.get_usage(), pool.null_block.block_id]

    # ---- references to a block ---------------------------------------------------------------------

    def get_new_blocks(self, place, num_blocks):
        return self.name(self.pools[place].get_new_blocks(num_blocks))

    def touch(self, place, names, form):
        blocks = self.find(names)
        self.pools[place].touch(tuple(blocks) if form == "tuple" else blocks)

    def add_reference(self, name):
        """Add a reference without the pool, as vLLM's copy-on-write does."""
        self.blocks[name].ref_cnt += 1

    def free_blocks(self, place, names, form):
        blocks = self.find(names)
        self.pools[place].free_blocks(iter(blocks) if form == "iterator" else blocks)

    def unpin_blocks(self, place, names, watcher):
        self.pools[place].unpin_blocks(self.find(names), Watcher(self, self.pools[place], watcher))

    def is_block_writable(self, place, name):
        return self.pools[place].is_block_writable(self.blocks[name])

    def set_num_free_blocks(self, place, num_blocks):
        """Set the free count, as one of vLLM's tests does to simulate a full pool."""
        self.pools[place].free_block_queue.num_free_blocks = num_blocks

    def get_num_free_blocks(self, place):
        return self.pools[place].get_num_free_blocks()

    def get_usage(self, place):
        return self.pools[place].get_usage()

    def iter_blocks_after(self, place, cursor, limit):
        queue = self.pools[place].free_block_queue
        after = None if cursor is None else self.blocks[cursor]
        return self.name(islice(queue.iter_blocks_after(after), limit))

    def repr_block(self, name):
        block = self.blocks[name]
        return "null" if self.ignores(block) else repr(block)

    # ---- keys of a block ---------------------------------------------------------------------------

    def get_cached_block(self, place, block_hash, group_ids):
        return self.name(self.pools[place].get_cached_block(bytes.fromhex(block_hash), group_ids))

    def cache_full_blocks(self, place, number, names, num_cached, num_full, block_size, group_id, mask):
        return self.pools[place].cache_full_blocks(
            request=self.requests[number],
            blocks=self.find(names),
            num_cached_blocks=num_cached,
            num_full_blocks=num_full,
            block_size=block_size,
            kv_cache_group_id=group_id,
            block_mask=mask,
        )

    def cache_partial_block(self, place, number, name, num_tokens, group_id, block_size, replace):
        return hex_of(
            self.pools[place].cache_partial_block(
                self.requests[number],
                self.blocks[name],
                num_tokens,
                group_id,
                block_size,
                replace_existing_hashes=replace,
            )
        )

    def move_block_hashes(self, place, source, target):
        return self.pools[place].move_block_hashes(self.blocks[source], self.blocks[target])

    def _insert_block_hash(self, place, key, name, num_tokens):
        return self.pools[place]._insert_block_hash(bytes.fromhex(key), self.blocks[name], num_tokens)

    def _maybe_evict_cached_block(self, place, name):
        return self.pools[place]._maybe_evict_cached_block(self.blocks[name])

    def evict_blocks(self, place, block_ids):
        # A dict serves as a set whose order is the same in every process.
        return self.pools[place].evict_blocks(dict.fromkeys(block_ids).keys())

    def reset_prefix_cache(self, place):
        return self.pools[place].reset_prefix_cache()

    # ---- the prefix map, as vLLM's connectors and tests use it -------------------------------------

    def get_one_block(self, place, key):
        return self.name_one(self.pools[place].cached_block_hash_to_block.get_one_block(bytes.fromhex(key)))

    def contain(self, place, key, block_id):
        return self.pools[place].cached_block_hash_to_block.contain(bytes.fromhex(key), block_id)

    def insert_into_map(self, place, key, name):
        self.pools[place].cached_block_hash_to_block.insert(bytes.fromhex(key), self.blocks[name])

    def pop_from_map(self, place, key, block_id):
        return self.name_one(self.pools[place].cached_block_hash_to_block.pop(bytes.fromhex(key), block_id))

    def take_entry(self, place, key):
        self.taken[key] = self.pools[place].cached_block_hash_to_block._cache.pop(bytes.fromhex(key))

    def put_entry_back(self, place, key):
        self.pools[place].cached_block_hash_to_block._cache[bytes.fromhex(key)] = self.taken.pop(key)

    # ---- events and samples ------------------------------------------------------------------------

    def emit_cached_block_events(self, place, number, num_cached, block_size, group_id):
        return self.pools[place].emit_cached_block_events(
            self.requests[number], num_cached, block_size, group_id
        )

    def append_event(self, place, external_hash):
        event = self.classes.BlockStored(
            block_hashes=[external_hash],
            parent_block_hash=None,
            token_ids=[],
            block_size=0,
            lora_id=None,
            medium="CPU",
            lora_name=None,
            locality="LOCAL",
        )
        self.pools[place].kv_event_queue.append(event)

    def take_events(self, place):
        """Return the events, their encoding, and whether the returned list is the queue itself."""
        queue = self.pools[place].kv_event_queue
        events = self.pools[place].take_events()
        wire = hashlib.blake2b(msgspec.msgpack.encode(events), digest_size=8).hexdigest()
        taken = [msgspec.to_builtins(event) for event in events]
        events.append("the caller's own")
        return [taken, wire, events is queue]

    def drain_samples(self):
        return [
            [sample.lifetime_seconds, sample.idle_seconds, list(sample.reuse_gaps_seconds)]
            for sample in self.collector.drain_events()
        ]

    # ---- everything observable ---------------------------------------------------------------------

    def picture(self):
        picture = {place: self.draw(pool) for place, pool in self.pools.items()}
        picture["bare"] = [
            [block.ref_cnt, hex_of(block.block_hash), block.block_hash_num_tokens, is_linked(block)]
            for block in self.bare
        ]
        picture["observed"] = list(self.observed)
        picture["reused"] = list(self.reused)
        if self.collector is not None:
            picture["followed"] = sorted(
                [block_id, state.birth_time_ns, state.last_access_ns, list(state.access_history)]
                for block_id, state in self.collector.block_metrics.items()
            )
        return picture

    def draw(self, pool):
        queue = pool.free_block_queue
        cache = pool.cached_block_hash_to_block
        is_ours = hasattr(pool, "reuse_watchers")
        if is_ours:
            watchers = {block_id: one.on_reuse for block_id, one in pool.reuse_watchers.items()}
        else:
            watchers = pool._reuse_watchers
        return {
            "queue": self.name(queue.get_all_free_blocks()),
            "queue from behind": self.name(walk_back(queue)),
            "free": [queue.num_free_blocks, pool.get_num_free_blocks()],
            "usage": float(pool.get_usage()),  # 0 for a pool of one block
            "blocks": [
                [
                    0 if self.ignores(block) else block.ref_cnt,
                    hex_of(block.block_hash),
                    block.block_hash_num_tokens,
                    is_linked(block),
                    block.is_null,
                    pool.is_block_writable(block),
                ]
                for block in pool.blocks
            ],
            "map": {
                key.hex(): {"copies": self.name(entry.values())}
                if isinstance(entry, dict)
                else self.name_one(entry)
                for key, entry in cache._cache.items()
            },
            "keys": [len(cache), bool(cache)],
            "secondary keys": sorted(
                [block_id, [key.hex() for key in keys]]
                for block_id, keys in pool.cached_block_hashes_by_block.items()
            ),
            "watched": [[block_id, watcher.name] for block_id, watcher in watchers.items()],
            "events": [msgspec.to_builtins(event) for event in pool.kv_event_queue],
        }


class Recorder:
    """An observer that records its calls. On eviction, a block still has its key."""

    def __init__(self, side):
        self.side = side

    def note(self, hook, block):
        if self.side.ignores(block):
            return
        self.side.observed.append([hook, self.side.names[id(block)], hex_of(block.block_hash)])

    def on_block_allocated(self, block):
        self.note("allocated", block)

    def on_block_accessed(self, block):
        self.note("accessed", block)

    def on_block_evicted(self, block):
        self.note("evicted", block)

    def reset(self):
        self.side.observed.append(["reset"])


class Watcher:
    """A reuse watcher that records what it sees: no reference yet, the key, no removal event yet."""

    def __init__(self, side, pool, name):
        self.side = side
        self.pool = pool
        self.name = name

    def __call__(self, block):
        self.side.reused.append(
            [
                self.name,
                self.side.names[id(block)],
                block.ref_cnt,
                hex_of(block.block_hash),
                len(self.pool.kv_event_queue),
                len(self.pool.cached_block_hash_to_block),
            ]
        )


def make_sharing_class(pool_class):
    """Return a class whose events go to another pool's queue through a property, as vLLM's HiSparse pool."""

    class SharedEventQueuePool(pool_class):
        def __init__(self, *arguments, event_owner, **options):
            self._event_owner = event_owner
            super().__init__(*arguments, **options)

        @property
        def kv_event_queue(self):
            return self._event_owner.kv_event_queue

        @kv_event_queue.setter
        def kv_event_queue(self, events):
            assert not events

    return SharedEventQueuePool


class PoolRequest:
    """The attributes of a request that a pool reads, made from a few plain values.

    Requests with the same prefix, adapter, images and salt have the tokens before `fork` in common. Hashes
    have 10 bytes, of which events carry 8.
    """

    def __init__(self, spec, hash_block_size, num_lookahead):
        self.spec = spec
        self.hash_block_size = hash_block_size
        self.num_lookahead = num_lookahead
        self.request_id = str(spec["number"])
        self.all_token_ids = []
        self.block_hashes = []
        self.lora_request = LORA if spec["lora"] else None
        self.mm_features = [
            SimpleNamespace(
                identifier=f"img{number}", mm_position=SimpleNamespace(offset=offset, length=length)
            )
            for number, (offset, length) in enumerate(spec["images"])
        ] or None
        self.cache_salt = spec["salt"]
        self.prompt_embeds = None
        self.session_id = spec["session"]
        self.grow(spec["num_tokens"])

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    def grow(self, num_tokens):
        spec, tokens, hashes = self.spec, self.all_token_ids, self.block_hashes
        for position in range(len(tokens), len(tokens) + num_tokens):
            is_shared = position < spec["fork"]
            tokens.append(position + 1000 * (spec["prefix"] if is_shared else 100 + spec["number"]))
        while (len(hashes) + 1) * self.hash_block_size + self.num_lookahead <= len(tokens):
            start = len(hashes) * self.hash_block_size
            covered = tokens[start : start + self.hash_block_size + self.num_lookahead]
            before = hashes[-1].hex() if hashes else [spec["lora"], spec["images"], spec["salt"]]
            hashed = hashlib.blake2b(repr([before, covered]).encode(), digest_size=4)
            hashes.append(b"prefix" + hashed.digest())


def is_linked(block):
    return block.prev_free_block is not None or block.next_free_block is not None


def walk_back(queue):
    block = queue.fake_free_list_tail.prev_free_block
    while block is not queue.fake_free_list_head:
        yield block
        block = block.prev_free_block
