"""`RequestDirectives`: the directives of requests that hold blocks or wait."""

from collections.abc import Sequence

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.retention.claim import PINNED, Claim
from kv_pool.manager.retention.directive import RetentionDirective
from kv_pool.manager.retention.segments import cut_into_segments, join_stretches

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
        ranges: list[Range] = []
        pinned: list[RetentionDirective] = []
        for directive in directives:
            if directive.is_none:
                continue
            ranges.append((directive.start, directive.end, self.make_claim(directive)))
            if directive.pin:
                pinned.append(directive)
        pins: list[tuple[GroupId, int, int]] = []
        for group_id, block_size in enumerate(self.block_sizes):
            if block_size and pinned:
                stretches = [
                    (one.start // block_size, -(-one.end // block_size))
                    for one in pinned
                    if one.end is not None
                ]
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
            claim = Claim(strength, duration_s, NEVER, False)
            self._claims[strength, duration_s] = claim
        return claim
