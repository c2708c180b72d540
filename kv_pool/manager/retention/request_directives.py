"""`RequestDirectives`: the directives of requests that hold blocks or wait."""

from collections.abc import Sequence

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.retention.claim import PINNED, Claim
from kv_pool.manager.retention.directive import RetentionDirective
from kv_pool.manager.retention.placed_claims import PinLedger
from kv_pool.manager.retention.segments import cut_into_segments, join_stretches

Range = tuple[int, int | None, Claim]
"""First token, end (exclusive) or None, and the claim on the blocks that hold these tokens."""
Place = tuple[GroupId, int]
"""A group, and the index of a block in a request's table of this group."""


class DirectedRequest:
    """The directives of one request.

    Attributes:
        ranges: the tokens of each directive, with its claim.
        promised: the places of the blocks that they may still pin. These pins count against the limit.
    """

    __slots__ = ("promised", "ranges")

    def __init__(self, ranges: list[Range], promised: set[Place]) -> None:
        self.ranges: list[Range] = ranges
        self.promised: set[Place] = promised


class RequestDirectives:
    """The directives of each request, and the pins that they promise.

    Attributes:
        by_request: the directives of each request that has some.
        block_sizes: tokens per block of each group; 0 for a group that is not cached.
    """

    def __init__(self, block_size: int, pins: PinLedger) -> None:
        self.by_request: dict[RequestId, DirectedRequest] = {}
        self.block_sizes: tuple[int, ...] = (block_size,)
        self._pins: PinLedger = pins
        self._claims: dict[tuple[int, float], Claim] = {}
        # The directive that was read last, and its claim: most requests have the same.
        self._last_directive: RetentionDirective | None = None
        self._last_claim: Claim | None = None

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
        promised = {(group_id, index) for group_id, low, high in pins for index in range(low, high)}
        num_replaced = self.count_promised(request_id)
        if ranges:
            self.by_request[request_id] = DirectedRequest(ranges, promised)
        else:
            self.by_request.pop(request_id, None)
        self._pins.num_promised += len(promised) - num_replaced

    def forget(self, request_id: RequestId) -> None:
        """Remove the directives of a request, and its promised pins."""
        request = self.by_request.pop(request_id, None)
        if request is not None:
            self._pins.num_promised -= len(request.promised)

    def cut(
        self, request_id: RequestId, group_id: GroupId, first: int, num_blocks: int
    ) -> list[tuple[int, int, tuple[Claim, ...]]]:
        """Return the claims on the blocks `[first, first + num_blocks)`; [] without directives."""
        request = self.by_request.get(request_id)
        block_size = self.block_sizes[group_id]
        if request is None or block_size == 0:
            return []
        return cut_into_segments(request.ranges, first, num_blocks, block_size)

    def pins(self, request_id: RequestId, group_id: GroupId, index: int) -> bool:
        """Return True if a directive pins the block at this place of the request's table."""
        request = self.by_request.get(request_id)
        return request is not None and (group_id, index) in request.promised

    def count_promised(self, request_id: RequestId) -> int:
        """Return the number of pins that are promised to this request."""
        request = self.by_request.get(request_id)
        return 0 if request is None else len(request.promised)

    def list_promised(
        self, request_id: RequestId, group_id: GroupId, first: int, blocks: list[KVCacheBlock]
    ) -> list[KVCacheBlock]:
        """Return those of these blocks that the request may pin; `first` is the table index of the first."""
        request = self.by_request.get(request_id)
        if request is None:
            return []
        return [block for index, block in enumerate(blocks, first) if (group_id, index) in request.promised]

    def end_promises(
        self, request_id: RequestId, group_id: GroupId, first: int, blocks: list[KVCacheBlock]
    ) -> None:
        """End the promises for those of these blocks that are pinned; the request releases the blocks.

        The other promises stay: the request may pin these blocks when it returns after a swap.
        """
        request = self.by_request.get(request_id)
        if request is None:
            return
        num_before = len(request.promised)
        for index, block in enumerate(blocks, first):
            if block in self._pins.blocks:
                request.promised.discard((group_id, index))
        self._pins.num_promised -= num_before - len(request.promised)

    def recount(self) -> None:
        """Count the promised pins again, after an interrupted call. O(requests)."""
        self._pins.num_promised = sum([len(request.promised) for request in self.by_request.values()])

    def make_claim(self, directive: RetentionDirective) -> Claim:
        """Return the claim of a directive; equal directives get the same object."""
        if directive is self._last_directive and self._last_claim is not None:
            return self._last_claim
        strength = PINNED if directive.pin else directive.priority
        duration_s = NEVER if directive.duration_s is None else directive.duration_s
        claim = self._claims.get((strength, duration_s))
        if claim is None:
            if len(self._claims) >= 1024:
                self._claims.clear()  # equal claims that are not the same object only cost a comparison
            claim = Claim(strength, duration_s, NEVER, False)
            self._claims[strength, duration_s] = claim
        self._last_directive = directive
        self._last_claim = claim
        return claim
