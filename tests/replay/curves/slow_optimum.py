"""Optimal replacement at one capacity, block by block: the slow model of the curve."""

from dataclasses import dataclass
from heapq import heappop, heappush

_NEVER = 1 << 62


@dataclass
class OptimumCounts:
    requests: int = 0
    refused_requests: int = 0
    blocks_hit: int = 0
    tokens_hit: int = 0


def replay_optimum(prompts, capacity, block_size, key_bytes):
    """Replay the prompts one at a time, evicting the block with the latest next hit, then the deepest."""
    counts = OptimumCounts()
    next_hits = list_next_hits(prompts, capacity, key_bytes)
    next_hit_of = {}  # of the cached blocks
    by_next_hit = []  # a heap of (-next hit, -position, key); some are outdated
    for number, prompt in enumerate(prompts):
        counts.requests += 1
        if prompt.num_blocks > capacity:
            counts.refused_requests += 1
            continue
        keys = split(prompt.keys, key_bytes)
        num_hits = 0
        while num_hits < prompt.max_hit and keys[num_hits] in next_hit_of:
            num_hits += 1
        counts.blocks_hit += num_hits
        counts.tokens_hit += min(num_hits * block_size, prompt.input_length)
        for key in keys:
            next_hit_of.pop(key, None)
        while len(next_hit_of) > capacity - prompt.num_blocks:
            negative, _, key = heappop(by_next_hit)
            if next_hit_of.get(key) == -negative:
                del next_hit_of[key]
        for position, key in enumerate(keys):
            next_hit_of[key] = next_hits[number][position]
            heappush(by_next_hit, (-next_hits[number][position], -position, key))
    return counts


def list_next_hits(prompts, capacity, key_bytes):
    """Return, per request and block, the next request that can hit the block."""
    next_hit_of = {}
    found = []
    for number in range(len(prompts) - 1, -1, -1):
        prompt = prompts[number]
        if prompt.num_blocks > capacity:
            found.append([])
            continue
        keys = split(prompt.keys, key_bytes)
        found.append([next_hit_of.get(key, _NEVER) for key in keys])
        for position, key in enumerate(keys):
            next_hit_of[key] = number if position < prompt.max_hit else _NEVER
    return found[::-1]


def split(keys, key_bytes):
    return [keys[start : start + key_bytes] for start in range(0, len(keys), key_bytes)]
