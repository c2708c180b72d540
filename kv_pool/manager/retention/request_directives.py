"""`RequestDirectives`: the directives of requests that hold blocks or wait, and which blocks they cover."""

from collections.abc import Sequence
from itertools import pairwise

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.retention.claims import PINNED, Claim, join_claims, rank_claim
from kv_pool.manager.retention.directive import RetentionDirective

Range = tuple[int, int | None, Claim]
"""First token, end (exclusive) or None, and the claim on the blocks that hold these tokens."""
Place = tuple[GroupId, int]
"""A group, and the index of a block in a request's table of this group."""


class RequestDirectives:
    """The directives of each request, and the pins that they promise.

    Attributes:
        by_request: the ranges of each request that has directives.
        promised: for each request with pins, the places of the blocks that it may still pin. These pins count
            against the limit.
        block_sizes: tokens per block of each group; 0 for a group that is not cached.
    """

    def __init__(self, block_size: int) -> None:
        self.by_request: dict[RequestId, list[Range]] = {}
        self.promised: dict[RequestId, set[Place]] = {}
        self.block_sizes: tuple[int, ...] = (block_size,)
        self._claims: dict[tuple[int, float], Claim] = {}

    def read(
        self, directives: Sequence[RetentionDirective]
    ) -> tuple[list[Range], list[tuple[GroupId, int, int]]]:
        """Return the ranges of these directives, and the blocks to pin as distinct stretches of groups."""
        ranges = [(one.start, one.end, self.make_claim(one)) for one in directives if not one.is_none]
        pinned = [(one.start, one.end) for one in directives if one.pin and one.end is not None]
        pins: list[tuple[GroupId, int, int]] = []
        for group_id, block_size in enumerate(self.block_sizes):
            if block_size and pinned:
                stretches = [(start // block_size, -(-end // block_size)) for start, end in pinned]
                pins += [(GroupId(group_id), low, high) for low, high in join_stretches(stretches)]
        return ranges, pins

    def set(self, request_id: RequestId, ranges: list[Range], pins: list[tuple[GroupId, int, int]]) -> None:
        """Replace the directives of a request and its promised pins; without ranges it has none.

        Args:
            pins: the result of `read`.
        """
        self.forget(request_id)
        if ranges:
            self.by_request[request_id] = ranges
        if pins:
            self.promised[request_id] = {
                (group_id, index) for group_id, low, high in pins for index in range(low, high)
            }

    def forget(self, request_id: RequestId) -> None:
        """Remove the directives of a request, and its promised pins."""
        self.by_request.pop(request_id, None)
        self.promised.pop(request_id, None)

    def cut(
        self, request_id: RequestId, group_id: GroupId, first: int, num_blocks: int
    ) -> list[tuple[int, int, tuple[Claim, ...]]]:
        """Return the claims on the blocks `[first, first + num_blocks)`; [] without directives."""
        ranges = self.by_request.get(request_id)
        block_size = self.block_sizes[group_id]
        if ranges is None or block_size == 0:
            return []
        return cut_into_segments(ranges, first, num_blocks, block_size)

    def pins(self, request_id: RequestId, group_id: GroupId, index: int) -> bool:
        """Return True if a directive pins the block at this place of the request's table."""
        promised = self.promised.get(request_id)
        return promised is not None and (group_id, index) in promised

    def count_promised(self) -> int:
        """Return the number of promised pins. O(requests with pins)."""
        return sum([len(places) for places in self.promised.values()])

    def take_promised(
        self, request_id: RequestId, group_id: GroupId, first: int, blocks: list[KVCacheBlock]
    ) -> list[KVCacheBlock]:
        """Return those of these blocks that the request pins as it releases them, and end their promises.

        The other promises stay: the request may pin these blocks when it returns after a swap.

        Args:
            first: the table index of the first block.
        """
        promised = self.promised.get(request_id)
        taken: list[KVCacheBlock] = []
        if promised is not None:
            for index, block in enumerate(blocks, first):
                if block.key is not None and (group_id, index) in promised:
                    promised.discard((group_id, index))
                    taken.append(block)
        return taken

    def make_claim(self, directive: RetentionDirective) -> Claim:
        """Return the claim of a directive; equal directives get the same object."""
        strength = PINNED if directive.pin else directive.priority
        duration_s = NEVER if directive.duration_s is None else directive.duration_s
        claim = self._claims.get((strength, duration_s))
        if claim is None:
            if len(self._claims) >= 1024:
                self._claims.clear()  # equal claims that are not the same object only cost a comparison
            claim = Claim(strength, duration_s)
            self._claims[strength, duration_s] = claim
        return claim


def cut_into_segments(
    ranges: list[Range], first: int, num_blocks: int, block_size: int
) -> list[tuple[int, int, tuple[Claim, ...]]]:
    """Return which claims of a request's directives are on which of its blocks `[first, first + num_blocks)`.

    Returns:
        (low, high, claims), in order, counted from `first`, without the blocks that have no claims.
    """
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
