"""`RequestDirectives`: the directives of requests that hold blocks or wait."""

from collections.abc import Sequence

from kv_pool.core.deadlines import NEVER
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.retention.claim import PINNED, Claim
from kv_pool.manager.retention.directive import RetentionDirective
from kv_pool.manager.retention.pins import PinLedger
from kv_pool.manager.retention.segments import cut_into_segments

Range = tuple[int, int | None, Claim]
"""First token, end (exclusive) or None, and the claim on the blocks that hold these tokens."""


class RequestDirectives:
    """The directives of each request, and the pins that they promise.

    Attributes:
        by_request: ranges of tokens with their claims, by request id.
        block_sizes: tokens per block of each group; 0 for a group that is not cached.
    """

    def __init__(self, block_size: int, pins: PinLedger) -> None:
        self.by_request: dict[RequestId, list[Range]] = {}
        self.block_sizes: tuple[int, ...] = (block_size,)
        self._pins: PinLedger = pins
        self._claims: dict[tuple[int, float], Claim] = {}
        # The directive that was read last, and its claim: most requests have the same.
        self._last_directive: RetentionDirective | None = None
        self._last_claim: Claim | None = None

    def read(self, directives: Sequence[RetentionDirective]) -> tuple[list[Range], set[tuple[GroupId, int]]]:
        """Return the ranges of these directives, and the (group, table index) pairs of the blocks to pin."""
        ranges: list[Range] = []
        pins: set[tuple[GroupId, int]] = set()
        for directive in directives:
            if directive.is_none:
                continue
            ranges.append((directive.start, directive.end, self.make_claim(directive)))
            if directive.pin and directive.end is not None:
                for group_id, block_size in enumerate(self.block_sizes):
                    if block_size == 0:
                        continue
                    for index in range(directive.start // block_size, -(-directive.end // block_size)):
                        pins.add((GroupId(group_id), index))
        return ranges, pins

    def set(self, request_id: RequestId, ranges: list[Range], pins: set[tuple[GroupId, int]]) -> None:
        """Set the directives and promised pins of a request that has none."""
        if pins:
            self._pins.promise(request_id, pins)
        if ranges:
            self.by_request[request_id] = ranges

    def forget(self, request_id: RequestId) -> None:
        """Remove the directives of a request, and its promised pins."""
        if request_id in self.by_request:
            del self.by_request[request_id]
        if self._pins.promised:
            self._pins.forget_request(request_id)

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
        block_size = self.block_sizes[group_id]
        for start, end, claim in self.by_request.get(request_id, []):
            is_in = start // block_size <= index and (end is None or index * block_size < end)
            if is_in and claim.strength == PINNED:
                return self._pins.is_promised(request_id, group_id, index)
        return False

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
        self._last_claim = None  # in case the next lines are interrupted
        self._last_directive = directive
        self._last_claim = claim
        return claim
