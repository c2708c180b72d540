"""`replay_optimum`: optimal replacement at one capacity, block by block (Belady's MIN)."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.curves.prompt_keys import PromptKeys

_NEVER = 1 << 62


@dataclass(slots=True)
class OptimumCounts:
    """The counts of a replay with optimal replacement, as in `ReplayReport`."""

    requests: int = 0
    refused_requests: int = 0
    blocks_hit: int = 0
    tokens_hit: int = 0
    evictions: int = 0


def replay_optimum(
    prompts: Sequence[PromptKeys], capacity: int, block_size: int, key_bytes: int
) -> OptimumCounts:
    """Replay the prompts one at a time through a pool that evicts the block with the latest next hit.

    The pool is that of the instant clock: all blocks of the running request stay, its new blocks are always
    cached, and a request larger than the pool is refused. Among blocks with the same next hit, the deepest in
    its prompt is evicted first. A block that its next request computes again (`max_hit`) has no next hit.

    Args:
        capacity: number of usable blocks.
    Raises:
        InvalidArgumentError: the capacity is below 1.

    Cost: O(log capacity) per block and request; `OptimumCurve` has the same counts for much less.
    """
    if capacity < 1:
        raise InvalidArgumentError(f"capacity is {capacity}; a pool has at least 1 usable block")
    counts = OptimumCounts()
    next_hits = _list_next_hits(prompts, capacity, key_bytes)
    next_hit_of: dict[bytes, int] = {}  # of the cached blocks
    by_next_hit: list[tuple[int, int, bytes]] = []  # a heap of (-next hit, -position, key); some are outdated
    for number, prompt in enumerate(prompts):
        counts.requests += 1
        if prompt.num_blocks > capacity:
            counts.refused_requests += 1
            continue
        keys = _split(prompt.keys, key_bytes)
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
                counts.evictions += 1
        for position, key in enumerate(keys):
            next_hit = next_hits[number][position]
            next_hit_of[key] = next_hit
            heappush(by_next_hit, (-next_hit, -position, key))
    return counts


def _list_next_hits(prompts: Sequence[PromptKeys], capacity: int, key_bytes: int) -> list["array[int]"]:
    """Return, per request and block, the next request that can hit the block; `_NEVER` for none."""
    next_hit_of: dict[bytes, int] = {}
    found = []
    for number in range(len(prompts) - 1, -1, -1):
        prompt = prompts[number]
        if prompt.num_blocks > capacity:
            found.append(array("q"))
            continue
        keys = _split(prompt.keys, key_bytes)
        found.append(array("q", [next_hit_of.get(key, _NEVER) for key in keys]))
        for position, key in enumerate(keys):
            next_hit_of[key] = number if position < prompt.max_hit else _NEVER
    found.reverse()
    return found


def _split(keys: bytes, key_bytes: int) -> list[bytes]:
    return [keys[start : start + key_bytes] for start in range(0, len(keys), key_bytes)]
