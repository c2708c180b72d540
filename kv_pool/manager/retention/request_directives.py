"""Which claims the directives of a request put on which of its blocks."""

from functools import lru_cache
from itertools import pairwise
from typing import Final

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import GroupId
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.retention.claims import PINNED, Claim, join_claims, rank_claim
from kv_pool.manager.retention.directive import RetentionDirective

Range = tuple[int, int | None, Claim]
"""First token, end (exclusive) or None, and the claim on the blocks that hold these tokens."""
Place = tuple[GroupId, int]
"""A group, and the index of a block in a request's table of this group."""


# Equal directives get the same claim, so that blocks with it share a record.
_find_claim: Final = lru_cache(1024)(Claim)


def make_claim(directive: RetentionDirective) -> Claim:
    """Return the claim of a directive; usually the same object for equal directives, whatever their range."""
    duration_s = NEVER if directive.duration_s is None else directive.duration_s
    return _find_claim(PINNED if directive.pin else directive.priority, duration_s)


def cut_into_segments(
    ranges: list[Range], first: int, num_blocks: int, block_size: int
) -> list[tuple[int, int, tuple[Claim, ...]]]:
    """Return which claims of a request's directives are on which of its blocks `[first, first + num_blocks)`.

    Args:
        block_size: 0 for a group that is not cached, whose blocks get no claims.
    Returns:
        (low, high, claims), in order, counted from `first`, without the blocks that have no claims.
    """
    if block_size == 0:
        return []
    if len(ranges) == 1:  # the usual case, which needs no sorting
        start, end, claim = ranges[0]
        low = max(0, start // block_size - first)
        high = num_blocks if end is None else min(num_blocks, -(-end // block_size) - first)
        return [(low, high, claim.alone)] if low < high else []
    in_order = sorted({claim for _, _, claim in ranges}, key=rank_claim)
    counts = [0] * len(in_order)
    ranks = {claim: rank for rank, claim in enumerate(in_order)}
    # The ranks of the claims that begin and end before a block.
    changes: dict[int, list[tuple[int, int]]] = {0: [], num_blocks: []}
    for start, end, claim in ranges:
        low = max(0, start // block_size - first)
        high = num_blocks if end is None else min(num_blocks, -(-end // block_size) - first)
        if low < high:
            changes.setdefault(low, []).append((ranks[claim], 1))
            changes.setdefault(high, []).append((ranks[claim], -1))
    segments: list[tuple[int, int, tuple[Claim, ...]]] = []
    for low, high in pairwise(sorted(changes)):
        for rank, change in changes[low]:
            counts[rank] += change
        claims = join_claims([claim for claim, count in zip(in_order, counts, strict=True) if count])
        if segments and segments[-1][1:] == (low, claims):
            segments[-1] = segments[-1][0], high, claims
        elif claims:
            segments.append((low, high, claims))
    return segments


def join_stretches(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same blocks as stretches `[low, high)` that are in order and do not overlap."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(stretches):
        if joined and low <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], high)
        elif low < high:
            joined.append((low, high))
    return joined


def find_cached(
    pool: BlockPoolCore,
    request: SchedulableRequest,
    group_id: GroupId,
    block_size: int,
    start: int,
    end: int | None,
) -> list[KVCacheBlock]:
    """Return the cached blocks of a prefix that hold any of the tokens `[start, end)`, head first."""
    hashes = request.block_hashes
    stride = block_size // pool.hash_block_size
    found: list[KVCacheBlock] = []
    if stride < 1:
        return found
    num_blocks = len(hashes) // stride
    if end is not None:
        num_blocks = min(num_blocks, -(-end // block_size))
    ours = hashes[start // block_size * stride + stride - 1 : num_blocks * stride : stride]
    found = pool.find_cached_prefix(ours, len(ours), group_id)
    group_ids = [group_id]
    for index in range(len(found) + 1, len(ours)):  # more may follow a hole that a window left
        blocks = pool.get_cached_block(ours[index], group_ids)
        if blocks is not None:
            found.append(blocks[0])
    return found
