"""`PinLedger`: the pinned blocks, the blocks that may still be pinned, and their limit."""

from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import PinLimitError
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.retention.claim import Claim, is_pin


class PinLedger:
    """The pins that count against a limit.

    Attributes:
        blocks: the pinned blocks, free or in use.
        promised: for each request, the (group, table index) pairs of blocks that its directives will pin.
        num_promised: the number of promised pins of all requests.
    """

    def __init__(self, max_pinned_blocks: int) -> None:
        self.max_pinned_blocks: int = max_pinned_blocks
        self.blocks: set[KVCacheBlock] = set()
        self.promised: dict[RequestId, set[tuple[GroupId, int]]] = {}
        self.num_promised: int = 0

    def note(self, block: KVCacheBlock, claims: tuple[Claim, ...]) -> None:
        """Record whether a block with these claims is pinned."""
        if is_pin(claims):
            self.blocks.add(block)
        elif self.blocks:
            self.blocks.discard(block)

    def drop(self, block: KVCacheBlock) -> None:
        """Record that the block is not pinned."""
        if self.blocks:
            self.blocks.discard(block)

    def rebuild(self, blocks: set[KVCacheBlock]) -> None:
        """Set the pinned blocks and count the promised ones."""
        self.blocks = blocks
        self.num_promised = sum([len(places) for places in self.promised.values()])

    def count(self) -> int:
        """Return the number of pinned and promised blocks."""
        return len(self.blocks) + self.num_promised

    def promise(self, request_id: RequestId, places: set[tuple[GroupId, int]]) -> None:
        """Promise a request, which has no promised pins, the pins of the blocks at these places."""
        self.promised[request_id] = places
        self.num_promised += len(places)

    def is_promised(self, request_id: RequestId, group_id: GroupId, index: int) -> bool:
        """Return True if the request may pin the block at this place of its table."""
        places = self.promised.get(request_id)
        return places is not None and (group_id, index) in places

    def list_promised(
        self, request_id: RequestId, group_id: GroupId, first: int, blocks: list[KVCacheBlock]
    ) -> list[KVCacheBlock]:
        """Return those of these blocks that the request may pin; `first` is the first one's table index."""
        return [
            block
            for index, block in enumerate(blocks, first)
            if self.is_promised(request_id, group_id, index)
        ]

    def fulfil(
        self, request_id: RequestId, group_id: GroupId, first: int, blocks: list[KVCacheBlock]
    ) -> None:
        """End the promises for those of these blocks that are pinned; the request releases the blocks.

        The other promises stay: the request may pin these blocks when it returns after a swap.
        """
        places = self.promised.get(request_id)
        if places is None:
            return
        num_before = len(places)
        for index, block in enumerate(blocks, first):
            if block in self.blocks:
                places.discard((group_id, index))
        self.num_promised -= num_before - len(places)

    def forget_request(self, request_id: RequestId) -> None:
        """Remove the promised pins of a request."""
        places = self.promised.pop(request_id, None)
        if places is not None:
            self.num_promised -= len(places)

    def count_promised(self, request_id: RequestId) -> int:
        """Return the number of pins that are promised to this request."""
        places = self.promised.get(request_id)
        return 0 if places is None else len(places)

    def exceeds(self, num_new: int, num_replaced: int) -> bool:
        """Return True if the pin limit would be exceeded."""
        return self.count() - num_replaced + num_new > self.max_pinned_blocks

    def refuse(self, num_new: int, num_replaced: int) -> PinLimitError:
        """Return the error for exceeding the pin limit."""
        return PinLimitError(
            f"{num_new} blocks would be pinned, and {self.count() - num_replaced} others are or may become "
            f"pinned; the limit is {self.max_pinned_blocks}. Pin less, remove pins with change_directives(), "
            "or raise max_pinned_blocks."
        )
