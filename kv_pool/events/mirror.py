"""`PrefixMirror`: an index of the blocks that each publisher holds; `follow` builds it from a stream."""

import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import or_
from typing import Any

from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.events.publisher_blocks import PublisherTable, PublisherTables, TrackedPublisher, to_wire_hashes
from kv_pool.events.stream_items import (
    BatchesLost,
    PublisherRestarted,
    ReceivedBatch,
    StreamItem,
    StreamSource,
)
from kv_pool.events.token_keys import chain_keys, root_key
from kv_pool.ids import ExternalBlockHash, GroupId

_Id = str | Callable[[StreamSource], str]

_CLEAR_AT_ONCE = 4096
# Large enough for the loop over blocks to run in C, small enough for an early miss to end it soon.
_LOOK_UP_AT_ONCE = 32


@dataclass(slots=True)
class MirrorCounts:
    """The effects of a publisher's events on the mirror.

    Attributes:
        num_batches: calls of `apply`.
        num_stored, num_removed: blocks added and removed, without those removed by clears.
        num_stored_again: stores of a hash that was already held: copies and reported hits.
        num_removed_unknown: removals of a hash that was not held; expected after a loss.
        num_unknown_parents: stores that cannot be found by tokens because their parent is unknown.
        num_refused: stored blocks that are not held: more groups and media than `max_places`, a medium name
            of more than 64 characters, or more blocks than `max_blocks`.
        num_refused_sizes: blocks that cannot be found by tokens: more block sizes than `max_block_sizes`.
        num_remote: ignored events about blocks that are not local to the publisher.
        num_clears: `AllBlocksCleared` events.
    """

    num_batches: int = 0
    num_stored: int = 0
    num_removed: int = 0
    num_stored_again: int = 0
    num_removed_unknown: int = 0
    num_unknown_parents: int = 0
    num_refused: int = 0
    num_refused_sizes: int = 0
    num_remote: int = 0
    num_clears: int = 0


class PrefixMirror:
    """An index of the blocks that each publisher holds, built from event streams, for routing requests.

        >>> from kv_pool import BlockHasher, BlockStored
        >>> from kv_pool.events import PrefixMirror
        >>> mirror = PrefixMirror()
        >>> mirror.apply("engine-1", [BlockStored([11, 12, 13], None, list(range(12)), 4, None, "GPU", None)])
        >>> mirror.apply("engine-2", [BlockStored([11], None, [0, 1, 2, 3], 4, None, "GPU", None)])
        >>> mirror.find_prefix([11, 12, 99])
        {'engine-2': 1, 'engine-1': 2}

    Hashes are compared as unsigned 64-bit numbers: signed integers are converted, and bytes are read from
    their last 8. Hashes of a `BlockHasher` therefore match if the engine uses the same algorithm and seed
    (`sha256_cbor`). A block without a group is in group 0, one without a medium on GPU; media are compared in
    upper case.

    Lookups cover only groups whose leading blocks form a prefix (`PREFIX_KINDS`): groups whose stores name
    such a kind, and group 0 while its stores name none. Blocks of other groups appear in `get_blocks` only.

    Args:
        learns_tokens: also index blocks by tokens (`find_prefix_of_tokens`), which works with any hash of the
            engine. About doubles time and memory.
        counts_copies: the default of `add_publisher`.
        max_places: maximum number of groups and media per publisher. Each adds a pass to every lookup.
        max_block_sizes: maximum number of block sizes per publisher that can be found by tokens; reset by
            a clear.
        max_blocks: maximum number of blocks per publisher, summed over groups and media. More than any engine
            has: it bounds the memory that a faulty or hostile publisher can use. Of a store that exceeds it,
            only the first blocks are held.

    Methods that change the mirror may be called from any thread. Lookups take no lock: during a change they
    see each block either before or after it.
    Memory: about 120 bytes per block and publisher, 190 with tokens; 170 and 260 once all blocks have been
    replaced, as dicts keep spare entries (a million blocks over 16 publishers).
    """

    def __init__(
        self,
        learns_tokens: bool = False,
        counts_copies: bool = True,
        max_places: int = 32,
        max_block_sizes: int = 8,
        max_blocks: int = 20_000_000,
    ) -> None:
        if min(max_places, max_block_sizes, max_blocks) < 1:
            raise InvalidArgumentError(
                f"max_places is {max_places}, max_block_sizes {max_block_sizes}, max_blocks {max_blocks}; "
                f"each must be at least 1"
            )
        self.learns_tokens = learns_tokens
        self.counts_copies = counts_copies
        self._publishers: dict[str, TrackedPublisher] = {}
        self._id_of_bit: dict[int, str] = {}
        self._all_bits = 0
        self._tables = PublisherTables(learns_tokens, max_places, max_block_sizes, max_blocks)
        self._lock = threading.Lock()

    # ---- changes ---------------------------------------------------------------------------------

    def add_publisher(self, publisher_id: str, counts_copies: bool | None = None) -> None:
        """Register a publisher before its first event. No-op if it is known.

        Args:
            counts_copies: hold a hash until it is removed as often as it was stored. True is correct for
                publishers that announce each copy of a block, as vLLM does, and for those that announce the
                first copy and the removal of the last. Pass False for publishers that also announce hits
                (vLLM's full report mode): on the wire hits look like copies, so such a hash would be held
                forever. None: as the mirror's `counts_copies`.
        """
        with self._lock:
            self._get_publisher(publisher_id, counts_copies)

    def apply(self, publisher_id: str, events: Iterable[Any]) -> None:
        """Apply events of a publisher, in their order.

        An unknown publisher is added. How often a hash must be removed: see `add_publisher`. Removing a hash
        that is not held only increments a counter. A clear removes all blocks of this publisher in every
        medium, because the event does not name one.

        Raises:
            InvalidTypeError: not an event. The events before it have been applied.
        Cost: O(blocks in the events), independent of the number held; a clear is O(blocks removed).
        """
        with self._lock:
            publisher = self._get_publisher(publisher_id, None)
            publisher.counts.num_batches += 1
            for event in events:
                if isinstance(event, BlockStored):
                    self._tables.apply_stored(publisher, event)
                elif isinstance(event, BlockRemoved):
                    self._tables.apply_removed(publisher, event)
                elif isinstance(event, AllBlocksCleared):
                    publisher.counts.num_clears += 1
                    self._remove_all_blocks(publisher)
                else:
                    raise InvalidTypeError(
                        f"a {type(event).__name__} is not an event; events are BlockStored, BlockRemoved, "
                        f"AllBlocksCleared"
                    )

    def clear_publisher(self, publisher_id: str) -> None:
        """Remove all blocks of a publisher, but keep the publisher. No-op if it is unknown."""
        with self._lock:
            publisher = self._publishers.get(publisher_id)
            if publisher is not None:
                self._remove_all_blocks(publisher)

    def remove_publisher(self, publisher_id: str) -> None:
        """Remove a publisher and its blocks. No-op if it is unknown."""
        with self._lock:
            publisher = self._publishers.pop(publisher_id, None)
            if publisher is not None:
                self._remove_all_blocks(publisher)
                del self._id_of_bit[publisher.bit]
                self._all_bits &= ~publisher.bit

    # ---- questions -------------------------------------------------------------------------------

    @property
    def publisher_ids(self) -> list[str]:
        return list(self._publishers)

    def find_prefix(
        self,
        block_hashes: Sequence[ExternalBlockHash],
        group: GroupId | None = None,
        medium: str | None = None,
    ) -> dict[str, int]:
        """Return the number of leading blocks of this sequence that each publisher holds, fewest first.

        Publishers that do not hold the first block are omitted.

        Args:
            block_hashes: hashes of the sequence, in order, as in events or from a `BlockHasher`.
            group: search only this KV cache group; None for all groups that lookups cover (see the class).
            medium: search only this medium; None for any, even a different one for each block.

        Cost: one dictionary lookup per block, group and medium, for all publishers at once, up to the end of
        the longest prefix.
        """
        tables = self._choose_tables(group, medium)
        if not tables or not len(block_hashes):
            return {}
        return self._count_leading([table.find_publishers for table in tables], to_wire_hashes(block_hashes))

    def find_best(
        self,
        block_hashes: Sequence[ExternalBlockHash],
        group: GroupId | None = None,
        medium: str | None = None,
    ) -> tuple[str, int] | None:
        """Return the publisher that holds the most leading blocks, and their number.

        Of several such publishers, the one registered first. None if no publisher holds the first block.
        """
        found = self.find_prefix(block_hashes, group, medium)
        if not found:
            return None
        most = max(found.values())
        return next((one, most) for one in self.publisher_ids if found.get(one) == most)

    def find_prefix_of_tokens(
        self,
        token_ids: Sequence[int],
        lora_name: str | None = None,
        extra_keys: Sequence[Sequence[Any] | None] = (),
        group: GroupId | None = None,
        medium: str | None = None,
    ) -> dict[str, int]:
        """Return the number of leading tokens of this prompt that each publisher holds in full blocks.

        The result counts tokens, not blocks, since publishers may have different block sizes. Works with any
        hash of the engines: the mirror identifies blocks by their tokens and their parent. Blocks stored
        without tokens, after an unknown parent, or with an adapter's number but not its name are not found;
        lookahead tokens are ignored.

        Args:
            extra_keys: per block, as in `BlockStored.extra_keys`: (identifier, offset) of multimodal inputs,
                the salt (first block only); with salts by region, the salt and the offset of each region, and
                the length of a multimodal input after its pair. The adapter's name may be omitted.
        Raises:
            InvalidArgumentError: the mirror was created without `learns_tokens`.
            InvalidArgumentError, InvalidTypeError: an invalid token.
        Cost: as `find_prefix`, plus one hash per block for each block size in use.
        """
        if not self.learns_tokens:
            raise InvalidArgumentError("to look up tokens, create the mirror with learns_tokens=True")
        lookups = [table.find_token_publishers for table in self._choose_tables(group, medium)]
        found: dict[str, int] = {}
        for block_size in list(self._tables.num_by_block_size) if lookups else ():
            keys = chain_keys(root_key(lora_name), token_ids, block_size, extra_keys, lora_name)
            for publisher_id, num_blocks in self._count_leading(lookups, keys).items():
                found[publisher_id] = max(found.get(publisher_id, 0), num_blocks * block_size)
        return found

    def count_blocks(self, publisher_id: str) -> int:
        """Return the number of hashes a publisher holds, over all groups and media; 0 if it is unknown."""
        publisher = self._publishers.get(publisher_id)
        return publisher.num_held if publisher else 0

    def count_by_place(self, publisher_id: str) -> dict[tuple[GroupId, str], int]:
        """Return the number of hashes a publisher holds per (group, medium); {} if it is unknown."""
        with self._lock:
            publisher = self._publishers.get(publisher_id)
            places = publisher.places if publisher else {}
            return {place: len(blocks.held) for place, blocks in places.items() if blocks.held.values}

    def get_counts(self, publisher_id: str) -> MirrorCounts:
        """Return the counters of a publisher. Raises InvalidArgumentError if it is unknown."""
        publisher = self._publishers.get(publisher_id)
        if publisher is None:
            raise InvalidArgumentError(f"unknown publisher {publisher_id!r}")
        counts: MirrorCounts = publisher.counts
        return counts

    def get_blocks(self, publisher_id: str) -> set[tuple[GroupId, str, int]]:
        """Return all (group, medium, hash) that a publisher holds; empty if it is unknown. O(blocks held)."""
        with self._lock:
            publisher = self._publishers.get(publisher_id)
            if publisher is None:
                return set()
            return {
                (group, medium, block_hash)
                for (group, medium), blocks in publisher.places.items()
                for block_hash in blocks.held.values
            }

    # ---- inside ----------------------------------------------------------------------------------

    def _get_publisher(self, publisher_id: str, counts_copies: bool | None) -> TrackedPublisher:
        publisher = self._publishers.get(publisher_id)
        if publisher is None:
            bit = 1
            while bit & self._all_bits:
                bit <<= 1
            counting = self.counts_copies if counts_copies is None else counts_copies
            publisher = self._publishers[publisher_id] = TrackedPublisher(bit, counting, MirrorCounts())
            self._id_of_bit[bit] = publisher_id
            self._all_bits |= bit
        return publisher

    def _remove_all_blocks(self, publisher: TrackedPublisher) -> None:
        """Remove all blocks of a publisher, in portions, so that other threads can run in between."""
        for blocks in publisher.places.values():
            hashes, token_keys = list(blocks.held.values), list(blocks.held.values.values())
            for start in range(0, len(hashes), _CLEAR_AT_ONCE):
                part = slice(start, start + _CLEAR_AT_ONCE)
                self._tables.remove_from_table(publisher, blocks, hashes[part], token_keys[part])
            self._tables.release_table(blocks)
        publisher.places.clear()
        publisher.num_held = 0
        self._tables.release_block_sizes(publisher)
        if len(publisher.prefix_groups) >= self._tables.max_places:
            publisher.prefix_groups.clear()

    def _choose_tables(self, group: GroupId | None, medium: str | None) -> list[PublisherTable]:
        if group is None and medium is None:
            return list(self._tables.tables.values())
        wanted = None if medium is None else medium.upper()
        return [
            table
            for (its_group, its_medium), table in self._tables.tables.items()
            if group in (None, its_group) and wanted in (None, its_medium)
        ]

    def _count_leading(
        self, lookups: Sequence[Callable[[Sequence[int]], list[int]]], keys: Sequence[int]
    ) -> dict[str, int]:
        """Return, per publisher, the number of leading `keys` that it holds."""
        found: dict[str, int] = {}
        left = self._all_bits
        position = 0
        for start in range(0, len(keys), _LOOK_UP_AT_ONCE):
            part = keys[start : start + _LOOK_UP_AT_ONCE]
            held_by = lookups[0](part)
            for look_up in lookups[1:]:
                held_by = list(map(or_, held_by, look_up(part)))
            bits = held_by[0]
            if held_by.count(bits) == len(held_by) and left & bits == left:
                position += len(held_by)  # the common case: no step per block
                continue
            for bits in held_by:
                still = left & bits
                if still != left:
                    if position:
                        self._note(found, left ^ still, position)
                    left = still
                    if not left:
                        return found
                position += 1
        if position:
            self._note(found, left, position)
        return found

    def _note(self, found: dict[str, int], bits: int, position: int) -> None:
        while bits:
            bit = bits & -bits
            bits ^= bit
            publisher_id = self._id_of_bit.get(bit)
            if publisher_id is not None:  # the publisher was not removed meanwhile
                found[publisher_id] = position


def follow(mirror: PrefixMirror, items: Iterable[StreamItem], publisher_id: _Id) -> Iterator[StreamItem]:
    """Apply each item to the mirror, then yield it.

        for item in follow(mirror, subscriber, "engine-1"):
            ...                       # the mirror is up to date as of this item

        for item in follow(mirror, subscriber, lambda source: source.topic):
            ...                       # the same with a publisher of the mirror for each topic

    Several publishers of one subscriber may share an id: the mirror then has the blocks of all, and forgets
    them all when one restarts, is cleared, or loses batches.

    See `apply_item` for the effect of a loss.
    """
    for item in items:
        apply_item(mirror, item, publisher_id)
        yield item


async def follow_async(
    mirror: PrefixMirror, items: AsyncIterable[StreamItem], publisher_id: _Id
) -> AsyncIterator[StreamItem]:
    """Apply items as `follow` does, in an event loop: `async for item in follow_async(mirror, items, "a")`.

    Decoding and applying an item blocks the loop, for long if it is a large snapshot. If that matters,
    iterate over `follow` in a thread; the mirror's lookups take no lock.
    """
    async for item in items:
        apply_item(mirror, item, publisher_id)
        yield item


def apply_item(mirror: PrefixMirror, item: StreamItem, publisher_id: _Id) -> None:
    """Apply one item of a stream.

    After a loss or a restart the publisher's blocks are forgotten: a lost batch may have removed any of them.
    Until they are stored again, the mirror has fewer blocks than the publisher, but no wrong ones. A loss
    that is healed by a snapshot changes nothing: the snapshot begins with a clear. The blocks of a silent
    publisher are kept: the router decides whether to send it requests.
    """
    if not isinstance(publisher_id, str):
        publisher_id = publisher_id(item.source)
    match item:
        case ReceivedBatch():
            mirror.apply(publisher_id, item.batch.unread_events)
        case BatchesLost(is_healed=False) | PublisherRestarted():
            mirror.clear_publisher(publisher_id)
        case _:
            pass
