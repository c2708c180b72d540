"""`Pins`: which blocks are pinned, which may yet be, and how many are allowed."""

from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import PinLimitError
from kv_pool.manager.retention.claim import Claim, is_pin


class Pins:
    """The pins that count against a limit.

    Attributes:
        blocks: those that are pinned, free or in use.
        promised: per request, (group, place in the table) of blocks that its directives will pin.
        num_promised: how many these are.
    """

    def __init__(self, max_pinned_blocks: int) -> None:
        self.max_pinned_blocks: int = max_pinned_blocks
        self.blocks: set[KVCacheBlock] = set()
        self.promised: dict[str, set[tuple[int, int]]] = {}
        self.num_promised: int = 0

    def note(self, block: KVCacheBlock, claims: tuple[Claim, ...]) -> None:
        """These are the claims on a block now: is one of them a pin?"""
        if is_pin(claims):
            self.blocks.add(block)
        elif self.blocks:
            self.blocks.discard(block)

    def drop(self, block: KVCacheBlock) -> None:
        """The block is not pinned."""
        if self.blocks:
            self.blocks.discard(block)

    def rebuild(self, blocks: set[KVCacheBlock]) -> None:
        """Take over the pinned blocks, and count the promised ones."""
        self.blocks = blocks
        self.num_promised = sum([len(places) for places in self.promised.values()])

    def count(self) -> int:
        """Pinned and promised."""
        return len(self.blocks) + self.num_promised

    def promise(self, request_id: str, places: set[tuple[int, int]]) -> None:
        """The request, to which nothing is promised, may pin the blocks at these places."""
        self.promised[request_id] = places
        self.num_promised += len(places)

    def is_promised(self, request_id: str, group_id: int, index: int) -> bool:
        """Whether the request may pin the block at this place of its table."""
        places = self.promised.get(request_id)
        return places is not None and (group_id, index) in places

    def list_promised(
        self, request_id: str, group_id: int, first: int, blocks: list[KVCacheBlock]
    ) -> list[KVCacheBlock]:
        """Return those of these blocks, from the place `first` of its table on, that the request may pin."""
        return [
            block
            for index, block in enumerate(blocks, first)
            if self.is_promised(request_id, group_id, index)
        ]

    def fulfil(self, request_id: str, group_id: int, first: int, blocks: list[KVCacheBlock]) -> None:
        """The request gives these of its blocks back: at the places of those that are pinned it pins no more.

        At the other places it may still do so when it comes back after it was swapped out.
        """
        places = self.promised.get(request_id)
        if places is None:
            return
        num_before = len(places)
        for index, block in enumerate(blocks, first):
            if block in self.blocks:
                places.discard((group_id, index))
        self.num_promised -= num_before - len(places)

    def forget_request(self, request_id: str) -> None:
        """Nothing is promised to the request."""
        places = self.promised.pop(request_id, None)
        if places is not None:
            self.num_promised -= len(places)

    def count_promised(self, request_id: str) -> int:
        """To this request."""
        places = self.promised.get(request_id)
        return 0 if places is None else len(places)

    def exceeds(self, num_new: int, num_replaced: int) -> bool:
        """Would it be too many?"""
        return self.count() - num_replaced + num_new > self.max_pinned_blocks

    def refuse(self, num_new: int, num_replaced: int) -> PinLimitError:
        """What to raise then."""
        return PinLimitError(
            f"{num_new} blocks would be pinned, and {self.count() - num_replaced} others are or may become "
            f"so; at most {self.max_pinned_blocks} may. Pin less, take pins off with change_directives(), or "
            "raise max_pinned_blocks."
        )
