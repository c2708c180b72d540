"""A pool as a picture, so that a failing test shows one.

free: 3 4 1* 2* | in use: 5 6*x2        next to be reused first; * = cached; x2 = two references
"""

import re
from types import SimpleNamespace

from kv_pool import BlockPool
from kv_pool.core import invariants

GROUP = b"\0\0\0\0"


def hash_of(number):
    """Return a made-up block hash that is easy to recognise."""
    return b"hash-%04d" % number


def make_pool(picture, pool_class=BlockPool, **options):
    """Return the pool that `state` draws as `picture`. Block n has the hash `hash_of(n)` if it has a star."""
    free, in_use = [], []
    for part in picture.split("|"):
        name, _, drawn = part.partition(":")
        target = {"free": free, "in use": in_use}[name.strip()]
        for text in drawn.split():
            block_id, star, times = re.fullmatch(r"(\d+)(\*?)(?:x(\d+))?", text).groups()
            target.append((int(block_id), bool(star), int(times or 1)))
    num_blocks = len(free) + len(in_use)
    assert sorted(block_id for block_id, _, _ in free + in_use) == list(range(1, num_blocks + 1))
    options = {"enable_caching": True, "hash_block_size": 4, **options}
    pool = pool_class(num_blocks + 1, **options)
    pool.get_new_blocks(num_blocks)
    for block_id, star, times in free + in_use:
        if star:
            cache(pool, pool.blocks[block_id])
        pool.blocks[block_id].ref_cnt = times
    for block_id, _, _ in free:
        pool.blocks[block_id].ref_cnt = 0
    pool.free_block_queue.append_n(blocks(pool, *(block_id for block_id, _, _ in free)))
    pool.take_events()
    invariants.check(pool)
    assert state(pool) == picture
    return pool


def state(pool):
    """Return the picture of a pool, in the form that `make_pool` reads."""

    def draw(block, times=1):
        star = "*" if block.block_hash is not None else ""
        return f"{block.block_id}{star}" + (f"x{times}" if times > 1 else "")

    free = [draw(block) for block in pool.free_block_queue.get_all_free_blocks()]
    held = [draw(block, block.ref_cnt) for block in pool.blocks[1:] if block.ref_cnt]
    parts = [f"free: {' '.join(free)}".strip()]
    if held:
        parts.append(f"in use: {' '.join(held)}")
    return " | ".join(parts)


def blocks(pool, *block_ids):
    return [pool.blocks[block_id] for block_id in block_ids]


def ids(found):
    return None if found is None else [block.block_id for block in found]


def cache(pool, block, number=None):
    """Cache one block under `hash_of(number)`, by default its own id."""
    number = block.block_id if number is None else number
    pool.cache_full_blocks(make_request([hash_of(number)]), [block], 0, 1, pool.hash_block_size, 0)


def make_request(block_hashes, block_size=4, **fields):
    """Return a request with only the fields that a pool reads; its tokens count up from 0."""
    request = {
        "request_id": "r",
        "block_hashes": block_hashes,
        "all_token_ids": list(range(len(block_hashes) * block_size)),
        "lora_request": None,
        "mm_features": None,
        "cache_salt": None,
        "session_id": None,
    }
    return SimpleNamespace(**{**request, **fields})
