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

    def __init__(self, pool_class, num_blocks, caching, events):
        make = lambda n: pool_class(n, caching, HASH_BLOCK_SIZE, enable_kv_cache_events=events)  # noqa: E731
        self.pool = make(num_blocks)
        self.neighbour = make(8)
        self.held = {}


def make_request(rng, number):
    prefix = rng.randrange(3)
    num_tokens = rng.randrange(1, 60)
    tokens = [prefix * 1000 + i for i in range(num_tokens)]
    fork = rng.randrange(num_tokens + 1)
    tokens[fork:] = [token + 100_000 * number for token in tokens[fork:]]
    lora = rng.choice(
        [None, None, SimpleNamespace(adapter_id=3, name="a", lora_name="a", lora_path="/p")]
    )
    features = None
    if rng.random() < 0.3:
        features = [
            SimpleNamespace(identifier="img0", mm_position=SimpleNamespace(offset=3, length=6)),
            SimpleNamespace(identifier="img1", mm_position=SimpleNamespace(offset=9, length=20)),
        ]
    hashes = []
    parent = b"root" + (b"lora" if lora else b"") + (b"mm" if features else b"")
    for end in range(HASH_BLOCK_SIZE, num_tokens + 1, HASH_BLOCK_SIZE):
        parent = kv_pool.BlockHasher("sha256", block_size=HASH_BLOCK_SIZE).hash_blocks(
            tokens[end - HASH_BLOCK_SIZE : end], (parent * 8)[:32]
        )[0]
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


def picture(side):
    """Everything observable about a side, in comparable form."""
    pool = side.pool
    cache = {
        key: [entry.block_id] if not isinstance(entry, dict) else ["dict", *entry]
        for key, entry in pool.cached_block_hash_to_block._cache.items()
    }
    return {
        "queue": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "neighbour": [block.block_id for block in side.neighbour.free_block_queue.get_all_free_blocks()],
        "blocks": [
            (block.ref_cnt, block.block_hash, block.block_hash_num_tokens, block.is_null)
            for block in pool.blocks[1:]
        ],
        "map": cache,
        "map length": len(pool.cached_block_hash_to_block),
        "free": pool.get_num_free_blocks(),
        "usage": pool.get_usage(),
        "held": {
            number: [block.block_id for block in blocks] for number, blocks in side.held.items()
        },
    }


def ids(blocks):
    return None if blocks is None else [block.block_id for block in blocks]


@pytest.mark.parametrize("seed", range(300))
def test_random_calls_agree_with_vllm(seed):
    from vllm.v1.core.block_pool import BlockPool as TheirPool

    rng = random.Random(seed)
    caching, events = rng.random() < 0.85, rng.random() < 0.7
    num_blocks = rng.randrange(2, 40)
    sides = [
        Side(pool_class, num_blocks, caching, events) for pool_class in (TheirPool, kv_pool.BlockPool)
    ]
    requests = {}
    cached_upto = {}

    def both(call):
        answers = [call(side) for side in sides]
        assert answers[0] == answers[1]
        return answers[0]

    for step in range(NUM_STEPS):
        roll = rng.random()
        if roll < 0.25:  # a new request, its cached prefix touched first
            request = make_request(rng, step)
            scale = rng.choice([1, 1, 2])
            size = HASH_BLOCK_SIZE * scale
            hits = [0]
            group = rng.choice([0, 0, 1])
            for block_hash in request.block_hashes[scale - 1 :: scale]:
                if both(lambda s, h=block_hash: ids(s.pool.get_cached_block(h, [group]))) is None:
                    break
                hits[0] += 1
            needed = -(-request.num_tokens // size) - hits[0]

            def start(side):
                found = [
                    side.pool.get_cached_block(h, [group])[0]
                    for h in request.block_hashes[scale - 1 :: scale][: hits[0]]
                ]
                side.pool.touch(found if rng_null < 0.8 else [side.pool.null_block, *found])
                try:
                    new = side.pool.get_new_blocks(needed)
                except ValueError:
                    side.pool.free_blocks(reversed(found))
                    return "full"
                side.held[request.request_id] = found + new
                return ids(new)

            rng_null = rng.random()
            if both(start) != "full":
                requests[request.request_id] = (request, size, group)
                cached_upto[request.request_id] = hits[0]
        elif roll < 0.5 and requests:  # cache some more full blocks
            number = rng.choice(list(requests))
            request, size, group = requests[number]
            first = cached_upto[number]
            end = rng.randrange(first, request.num_tokens // size + 1)
            if not caching and any(block.block_hash for block in sides[0].held[number][first:end]):
                continue  # with caching off a reused block keeps its hash, and vLLM asserts half-way
            mask = None
            if rng.random() < 0.2:
                mask = [rng.random() < 0.7 for _ in range(end - first)]

            def cache(side):
                return side.pool.cache_full_blocks(
                    request, side.held[number], first, end, size, group, mask
                )

            both(cache)
            cached_upto[number] = end
        elif roll < 0.75 and requests:  # free one, with strangers in the list
            number = rng.choice(list(requests))
            stranger, null = rng.random() < 0.3, rng.random() < 0.3

            def free(side):
                blocks = list(reversed(side.held.pop(number)))
                if null:
                    blocks.insert(len(blocks) // 2, side.pool.null_block)
                if stranger:
                    blocks[1:1] = side.neighbour.get_new_blocks(2)
                side.pool.free_blocks(iter(blocks))

            both(free)
            del requests[number], cached_upto[number]
        elif roll < 0.80 and requests:  # another holder of a prefix, for a moment
            number = rng.choice(list(requests))
            count = rng.randrange(1, 4)

            def hold(side):
                side.pool.touch(tuple(side.held[number][:count]) * 2)
                side.pool.free_blocks(side.held[number][:count])
                side.pool.free_blocks(side.held[number][:count])

            both(hold)
        elif roll < 0.88:
            chosen = {rng.randrange(1, num_blocks) for _ in range(3)}
            both(lambda side: side.pool.evict_blocks(chosen))
        elif roll < 0.91:
            both(lambda side: side.pool.reset_prefix_cache())
        elif roll < 0.95:
            block_id = rng.randrange(1, num_blocks)
            both(lambda side: side.pool._maybe_evict_cached_block(side.pool.blocks[block_id]))
        else:
            both(lambda side: [msgspec.msgpack.encode(event) for event in side.pool.take_events()])
        both(picture)
    both(lambda side: [msgspec.msgpack.encode(event) for event in side.pool.take_events()])
