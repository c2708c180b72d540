"""Random calls on our BlockPool and on vLLM 0.33's side by side: same answers, same state, same events.

Runs where vLLM's core imports (marker `vllm`); `conftest.py` leaves it out elsewhere.
"""

import random
from types import SimpleNamespace

import msgspec
import pytest

import kv_pool

pytestmark = pytest.mark.vllm

HASH_BLOCK_SIZE = 4
NUM_STEPS = 400


class Side:
    """One implementation: a pool, a neighbour pool, and what requests hold."""

    def __init__(self, pool_class, num_blocks, caching, options):
        self.pool = pool_class(num_blocks, caching, HASH_BLOCK_SIZE, **options)
        self.neighbour = pool_class(8, caching, HASH_BLOCK_SIZE, **options)
        self.held = {}
        self.reused = []

    def look_up(self, block_hash, group):
        return ids(self.pool.get_cached_block(block_hash, [group]))

    def start(self, request, hits, num_new_blocks, group, with_null):
        found = [self.pool.get_cached_block(block_hash, [group])[0] for block_hash in hits]
        self.pool.touch([self.pool.null_block, *found] if with_null else found)
        try:
            new = self.pool.get_new_blocks(num_new_blocks)
        except ValueError:
            self.pool.free_blocks(reversed(found))
            return "full"
        self.held[request.request_id] = found + new
        return ids(new)

    def cache(self, request, first, end, size, group, mask):
        table = self.held[request.request_id]
        return self.pool.cache_full_blocks(request, table, first, end, size, group, mask)

    def cache_partially(self, request, index, num_tokens, size, group, replace):
        block = self.held[request.request_id][index]
        return self.pool.cache_partial_block(request, block, num_tokens, group, size, replace)

    def move(self, request, source, target):
        blocks = self.held[request.request_id]
        if blocks[target].block_hash is None:
            self.pool.move_block_hashes(blocks[source], blocks[target])

    def unpin(self, request):
        self.pool.unpin_blocks(self.held.pop(request.request_id), self.note_reuse)

    def note_reuse(self, block):
        """What a watcher sees: no reference yet, the old hash, and no removal announced."""
        self.reused.append((block.block_id, block.ref_cnt, block.block_hash, len(self.pool.kv_event_queue)))

    def emit(self, request, num_blocks, size, group):
        self.pool.emit_cached_block_events(request, num_blocks, size, group)

    def free(self, request, with_null, with_strangers):
        blocks = self.held.pop(request.request_id)[::-1]
        if with_null:
            blocks.insert(len(blocks) // 2, self.pool.null_block)
        if with_strangers:
            blocks[1:1] = self.neighbour.get_new_blocks(2)
        return self.pool.free_blocks(iter(blocks))

    def hold_for_a_moment(self, request, count):
        some = self.held[request.request_id][:count]
        self.pool.touch(tuple(some) * 2)
        self.pool.free_blocks(some)
        self.pool.free_blocks(some)

    def evict(self, block_ids):
        return self.pool.evict_blocks(block_ids)

    def evict_one(self, block_id):
        return self.pool._maybe_evict_cached_block(self.pool.blocks[block_id])

    def reset(self):
        return self.pool.reset_prefix_cache()

    def take_events(self):
        return [msgspec.msgpack.encode(event) for event in self.pool.take_events()]

    def picture(self):
        """Everything observable, in comparable form."""
        pool = self.pool
        return {
            "queue": ids(pool.free_block_queue.get_all_free_blocks()),
            "neighbour": ids(self.neighbour.free_block_queue.get_all_free_blocks()),
            "blocks": [
                (block.ref_cnt, block.block_hash, block.block_hash_num_tokens, block.is_null)
                for block in pool.blocks[1:]
            ],
            "map": {
                key: ["dict", *entry] if isinstance(entry, dict) else entry.block_id
                for key, entry in pool.cached_block_hash_to_block._cache.items()
            },
            "writable": [pool.is_block_writable(block) for block in pool.blocks],
            "secondary": {
                block_id: set(keys) for block_id, keys in pool.cached_block_hashes_by_block.items()
            },
            "reused": self.reused,
            "watched": sorted(pool._reuse_watchers),
            "keys": len(pool.cached_block_hash_to_block),
            "free": pool.get_num_free_blocks(),
            "usage": pool.get_usage(),
            "held": {name: ids(blocks) for name, blocks in self.held.items()},
        }


class Schedule:
    """A random schedule that makes every call on both sides and compares after each."""

    def __init__(self, seed):
        from vllm.v1.core.block_pool import BlockPool as TheirPool

        self.rng = rng = random.Random(seed)
        self.caching = rng.random() < 0.85
        options = {
            "enable_kv_cache_events": rng.random() < 0.7,
            "num_hash_lookahead_tokens": rng.choice([0, 0, 3]),
            "medium": rng.choice(["GPU", "CPU"]),
        }
        self.num_blocks = rng.randrange(2, 40)
        self.sides = [
            Side(pool_class, self.num_blocks, self.caching, options)
            for pool_class in (TheirPool, kv_pool.BlockPool)
        ]
        self.running = {}  # request, block size, group, blocks cached so far
        self.num_started = 0

    def both(self, call, *arguments):
        theirs, ours = [getattr(side, call)(*arguments) for side in self.sides]
        assert theirs == ours, call
        return theirs

    def run(self):
        steps = {
            self.start: 25,
            self.cache: 25,
            self.cache_partially: 8,
            self.move: 3,
            self.unpin: 4,
            self.emit: 3,
            self.free: 25,
            self.hold: 5,
            self.evict: 8,
            self.evict_one: 4,
            self.reset: 3,
            self.take_events: 5,
        }
        for step in self.rng.choices(list(steps), list(steps.values()), k=NUM_STEPS):
            if self.running or step in (self.start, self.evict, self.evict_one, self.reset, self.take_events):
                step()
            self.both("picture")
        self.take_events()

    def start(self):
        rng = self.rng
        self.num_started += 1
        request = make_request(rng, self.num_started)
        scale, group = rng.choice([1, 1, 2]), rng.choice([0, 0, 1])
        hits = []
        for block_hash in request.block_hashes[scale - 1 :: scale]:
            if self.both("look_up", block_hash, group) is None:
                break
            hits.append(block_hash)
        size = HASH_BLOCK_SIZE * scale
        num_new = -(-request.num_tokens // size) - len(hits)
        if self.both("start", request, hits, num_new, group, rng.random() < 0.2) != "full":
            self.running[request.request_id] = [request, size, group, len(hits)]

    def cache(self):
        rng = self.rng
        entry = rng.choice(list(self.running.values()))
        request, size, group, first = entry
        end = rng.randrange(first, request.num_tokens // size + 1)
        table = self.sides[0].held[request.request_id]
        ends = range((first + 1) * size, (end + 1) * size, size)
        if any(
            block.block_hash is not None
            and (block.block_hash_num_tokens is None or block.block_hash_num_tokens >= num_tokens)
            for block, num_tokens in zip(table[first:end], ends, strict=True)
        ):
            return  # cached for as much already: vLLM asserts half-way
        mask = [rng.random() < 0.7 for _ in range(end - first)] if rng.random() < 0.2 else None
        self.both("cache", request, first, end, size, group, mask)
        entry[3] = end

    def cache_partially(self):
        rng = self.rng
        request, size, group, _ = rng.choice(list(self.running.values()))
        table = self.sides[0].held[request.request_id]
        if request.block_hashes and table:
            num_tokens = rng.randrange(1, len(request.block_hashes) + 1) * HASH_BLOCK_SIZE
            index = rng.randrange(len(table))
            if len(self.sides[0].pool.cached_block_hashes_by_block.get(table[index].block_id, ())) > 0:
                return  # in which order vLLM removes two secondary keys is not defined
            self.both("cache_partially", request, index, num_tokens, size, group, rng.random() < 0.1)

    def move(self):
        request, *_ = self.rng.choice(list(self.running.values()))
        num_blocks = len(self.sides[0].held[request.request_id])
        if num_blocks > 1:
            self.both("move", request, *self.rng.sample(range(num_blocks), 2))

    def unpin(self):
        request, *_ = self.running.pop(self.rng.choice(list(self.running)))
        self.both("unpin", request)

    def emit(self):
        request, size, group, cached = self.rng.choice(list(self.running.values()))
        self.both("emit", request, cached, size, group)

    def free(self):
        request, *_ = self.running.pop(self.rng.choice(list(self.running)))
        self.both("free", request, self.rng.random() < 0.3, self.rng.random() < 0.3)

    def hold(self):
        request, *_ = self.rng.choice(list(self.running.values()))
        self.both("hold_for_a_moment", request, self.rng.randrange(1, 4))

    def evict(self):
        self.both("evict", {self.rng.randrange(1, self.num_blocks) for _ in range(3)})

    def evict_one(self):
        self.both("evict_one", self.rng.randrange(1, self.num_blocks))

    def reset(self):
        self.both("reset")

    def take_events(self):
        self.both("take_events")


def ids(blocks):
    return None if blocks is None else [block.block_id for block in blocks]


def make_request(rng, number):
    prefix = rng.randrange(3)
    num_tokens = rng.randrange(1, 60)
    tokens = [prefix * 1000 + i for i in range(num_tokens)]
    fork = rng.randrange(num_tokens + 1)
    tokens[fork:] = [token + 100_000 * number for token in tokens[fork:]]
    lora = rng.choice([None, None, SimpleNamespace(adapter_id=3, name="a", lora_name="a", lora_path="/p")])
    features = None
    if rng.random() < 0.3:
        features = [
            SimpleNamespace(identifier="img0", mm_position=SimpleNamespace(offset=3, length=6)),
            SimpleNamespace(identifier="img1", mm_position=SimpleNamespace(offset=9, length=20)),
        ]
    hashes = []
    hasher = kv_pool.BlockHasher("sha256", block_size=HASH_BLOCK_SIZE)
    parent = b"root" + (b"lora" if lora else b"") + (b"mm" if features else b"")
    for end in range(HASH_BLOCK_SIZE, num_tokens + 1, HASH_BLOCK_SIZE):
        tail = tokens[end - HASH_BLOCK_SIZE : end]
        (parent,) = hasher.hash_blocks(tail, (parent * 8)[:32])
        hashes.append(parent)
    return SimpleNamespace(
        request_id=str(number),
        all_token_ids=tokens,
        num_tokens=num_tokens,
        block_hashes=hashes,
        lora_request=lora,
        mm_features=features,
        cache_salt=rng.choice([None, "salt"]),
        prompt_embeds=None,
        session_id=rng.choice([None, "s-1"]),
    )


@pytest.mark.parametrize("seed", range(300))
def test_random_calls_agree_with_vllm(seed):
    Schedule(seed).run()
