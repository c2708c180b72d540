"""`ResidentBlocks`: the resident hashes, their number of copies and their announced fields. Compiled."""

from collections.abc import Iterator
from typing import Any, Final

from kv_pool.core.kv_events import BlockRemoved, BlockStored
from kv_pool.events.block_spans import BlockKind
from kv_pool.events.place_blocks import Change, Place, PlaceBlocks
from kv_pool.ids import ExternalBlockHash

NUM_FORGOTTEN_AT_ONCE: Final = 1024
"""Number of dict entries that one call of `drop_some` frees, in 0.1 ms."""


class ResidentBlocks:
    """The resident blocks of a pool, counted from its events: one for each block that gains or loses a hash.

    Attributes:
        places: the blocks of each place.
        changes: None, or the list set by `watch`, to which all changes are appended, oldest first; a None
            in it stands for a clear.
    """

    def __init__(self, keeps_token_ids: bool) -> None:
        self.keeps_token_ids = keeps_token_ids
        self.places: dict[Place, PlaceBlocks] = {}
        self.changes: list[Change | None] | None = None
        self._kinds: dict[BlockKind, BlockKind] = {}
        self._forgotten: list[dict[Any, Any]] = []

    def __len__(self) -> int:
        return sum(len(blocks.held) for blocks in self.places.values())

    def __iter__(self) -> Iterator[tuple[Place, ExternalBlockHash, int]]:
        """Yield each hash with its place and the number of blocks that carry it."""
        for place, blocks in self.places.items():
            for block_hash, num_copies in blocks.held:
                yield place, block_hash, num_copies

    def watch(self, changes: list[Change | None] | None) -> None:
        """Append all changes to this list from now on; None stops this."""
        self.changes = changes
        for blocks in self.places.values():
            blocks.changes = changes

    def get_or_add_place(self, place: Any) -> PlaceBlocks:
        """Return the blocks of a place, given as a tuple equal to a `Place`; a new place is added."""
        blocks = self.places.get(place)
        if blocks is None:
            blocks = PlaceBlocks(Place(*place))
            self.places[blocks.place] = blocks
            blocks.changes = self.changes
        return blocks

    def store(self, fields: tuple[Any, ...]) -> tuple[PlaceBlocks, list[int] | None]:
        """Add one copy of each hash of a `BlockStored` that has hashes. O(hashes).

        Args:
            fields: the event as a tuple, from `msgspec.structs.astuple`. In compiled code that call takes as
                long as reading two fields by name.
        Returns:
            The blocks of the event's place, and the positions of hashes that had no copy before; None if this
            is all of them.
        """
        # By index: unpacking the fields takes longer.
        hashes: list[Any] = fields[0]
        token_ids, block_size, extra_keys, lookahead = fields[2], fields[3], fields[7], fields[14]
        place = (fields[5], fields[8], fields[11], fields[12])
        kind_key: Any = (block_size, fields[4], fields[6], fields[9], fields[10], extra_keys is not None)
        num_blocks = len(hashes)
        kind = self._kinds.get(kind_key)  # equal to a `BlockKind`, and created faster
        if kind is None:
            kind = BlockKind(*kind_key)
            self._kinds[kind] = kind
        if not self.keeps_token_ids or not block_size or len(token_ids) != num_blocks * block_size:
            token_ids = None
        if lookahead is not None:
            lookahead = one_each(lookahead, num_blocks) if self.keeps_token_ids else None
        blocks = self.get_or_add_place(place)
        if extra_keys is not None:
            extra_keys = one_each(extra_keys, num_blocks)
        return blocks, blocks.store(hashes, fields[1], kind, token_ids, extra_keys, lookahead)

    def clear(self) -> None:
        """Remove all hashes in all places. `drop_some` frees the memory in pieces."""
        for blocks in self.places.values():
            self._forgotten += [blocks.held.values, blocks.held.copies, blocks.children, *blocks.shards]
        self.places = {}
        self._kinds = {}
        if self.changes is not None:
            self.changes.append(None)

    def drop_some(self) -> None:
        """Free some of the memory of cleared blocks, for at most about 0.1 ms."""
        num_left = NUM_FORGOTTEN_AT_ONCE
        while self._forgotten and num_left > 0:
            last = self._forgotten[-1]
            num_taken = min(num_left, len(last))
            for _ in range(num_taken):
                last.popitem()
            if not last:
                del self._forgotten[-1]
            num_left -= num_taken + 1


def find_place(event: BlockStored | BlockRemoved) -> Place:
    """Return the place of an event's blocks."""
    return Place(event.medium, event.group_idx, event.locality, event.ownership)


def is_dense(event: BlockStored) -> bool:
    """Return True if the event has exactly the tokens of its blocks."""
    return len(event.token_ids) == len(event.block_hashes) * event.block_size


def one_each(entries: list[Any] | None, num_hashes: int) -> tuple[Any, ...] | None:
    """Return the entries as a tuple; None if not one per hash, or if all are None."""
    if entries and len(entries) == num_hashes and entries.count(None) < num_hashes:
        return tuple(entries)
    return None
