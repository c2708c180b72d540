"""`PrefixMirror`: which publisher holds which blocks, learned from their event streams alone."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import or_
from typing import Any

from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.events.held_blocks import HolderTable, HolderTables, TrackedPublisher, to_wire_hashes
from kv_pool.events.token_keys import chain_keys, root_key
from kv_pool.ids import ExternalBlockHash

MAX_PLACES = 32
"""Default of `PrefixMirror.max_places`."""

MAX_BLOCK_SIZES = 8
"""Default of `PrefixMirror.max_block_sizes`."""

MAX_BLOCKS = 20_000_000
"""Default of `PrefixMirror.max_blocks`."""

_CLEAR_AT_ONCE = 4096
# Enough that the loop over blocks runs in C, few enough that a miss at the start ends it soon.
_LOOK_UP_AT_ONCE = 32


@dataclass(slots=True)
class PublisherCounts:
    """What a publisher's events did to the mirror.

    Attributes:
        num_batches: calls of `apply`.
        num_stored, num_removed: blocks that became held, and no longer held, clears not counted.
        num_stored_again: stores of a hash that was held already: copies, and hits reported.
        num_removed_unknown: removals of a hash that was not held; after a loss they are expected.
        num_unknown_parents: stores of which the tokens can not be placed, since their parent is not known.
        num_refused: blocks of stores in more groups and media than `max_places`, in a medium with a name of
            more than 64 characters, or beyond `max_blocks`; they are not held.
        num_refused_sizes: blocks of more sizes than `max_block_sizes`; they are not found by tokens.
        num_remote: events about blocks that are somewhere else, left out.
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
    """Which publisher holds which blocks, learned from event streams; fast enough to route requests by.

        >>> from kv_pool import BlockHasher, BlockStored
        >>> from kv_pool.events import PrefixMirror
        >>> mirror = PrefixMirror()
        >>> mirror.apply("engine-1", [BlockStored([11, 12, 13], None, list(range(12)), 4, None, "GPU", None)])
        >>> mirror.apply("engine-2", [BlockStored([11], None, [0, 1, 2, 3], 4, None, "GPU", None)])
        >>> mirror.find_prefix([11, 12, 99])
        {'engine-2': 1, 'engine-1': 2}

    Hashes are compared as 64-bit numbers: integers as they come, signed ones as unsigned, bytes by their last
    8, so that a `BlockHasher`'s hashes can be looked up where the engine uses the same algorithm and seed
    (`sha256_cbor`). A block without a group is in group 0, one without a medium on GPU; media are compared in
    upper case.

    Only groups whose leading blocks are a prefix (`PREFIX_KINDS`) are looked up: those whose stores say so,
    and group 0 while they say nothing. Blocks of other groups are kept and shown by `state_of` only.

    Args:
        learns_tokens: also make blocks findable by tokens (`find_prefix_of_tokens`), whatever the engine
            hashes with. Costs about as much again, in time and memory.
        counts_copies: the default of `add_publisher`.
        max_places: groups and media in which one publisher's blocks are held at a time. Each costs every
            lookup a pass, so a publisher must not name any number of them.
        max_block_sizes: sizes of blocks that are found by tokens, of one publisher until its next clear.
        max_blocks: blocks that one publisher holds at a time, each group and medium counted. More than any
            engine has: it bounds what a faulty or hostile one can make the mirror take. Of a store beyond it
            the first blocks are held.

    Calls that change may come from any thread. Lookups take no lock: they see each block as it was before or
    after a change that runs meanwhile.
    Memory: about 120 bytes for each block and publisher that holds it, 180 with tokens; 190 and 270 when all
    blocks were replaced since, as dicts keep spare entries (200,000 blocks over 16 publishers).
    """

    def __init__(
        self,
        learns_tokens: bool = False,
        counts_copies: bool = False,
        max_places: int = MAX_PLACES,
        max_block_sizes: int = MAX_BLOCK_SIZES,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        if min(max_places, max_block_sizes, max_blocks) < 1:
            raise InvalidArgumentError(
                f"max_places is {max_places}, max_block_sizes {max_block_sizes}, max_blocks {max_blocks}; "
                f"each is at least 1"
            )
        self.learns_tokens = learns_tokens
        self.counts_copies = counts_copies
        self._publishers: dict[str, TrackedPublisher] = {}
        self._id_of_bit: dict[int, str] = {}
        self._all_bits = 0
        self._held = HolderTables(learns_tokens, max_places, max_block_sizes, max_blocks)
        self._lock = threading.Lock()

    # ---- changes ---------------------------------------------------------------------------------

    def add_publisher(self, publisher_id: str, counts_copies: bool | None = None) -> None:
        """Get to know a publisher before its first event; nothing happens if it is known.

        Args:
            counts_copies: a hash is held until it was removed as often as it was stored. For publishers that
                announce each copy of a block, as vLLM does. Wrong for those that also announce hits (vLLM's
                full report mode), which the wire does not tell from copies: such a hash is never let go. A
                publisher that announces the first copy and the removal of the last needs no counting and can
                stand it.
        """
        with self._lock:
            self._get_publisher(publisher_id, counts_copies)

    def apply(self, publisher_id: str, events: Iterable[Any]) -> None:
        """Take over what happened in this publisher's pool, in the order it happened.

        An unknown publisher is added. A hash stored twice is held once (see `add_publisher`), a hash removed
        that is not held is counted and no more. A clear clears everything of this publisher, every medium:
        the event does not say which was meant.

        Raises:
            InvalidTypeError: not an event; those before it have been applied.
        Cost: per block, independent of how many are held; a clear costs what is cleared.
        """
        with self._lock:
            publisher = self._get_publisher(publisher_id, None)
            publisher.counts.num_batches += 1
            for event in events:
                if isinstance(event, BlockStored):
                    self._held.apply_stored(publisher, event)
                elif isinstance(event, BlockRemoved):
                    self._held.apply_removed(publisher, event)
                elif isinstance(event, AllBlocksCleared):
                    publisher.counts.num_clears += 1
                    self._let_go_of_all(publisher)
                else:
                    raise InvalidTypeError(
                        f"a {type(event).__name__} is no event; they are BlockStored, BlockRemoved, "
                        f"AllBlocksCleared"
                    )

    def clear_publisher(self, publisher_id: str) -> None:
        """Forget what this publisher holds, not that it exists. Nothing happens if it is unknown."""
        with self._lock:
            publisher = self._publishers.get(publisher_id)
            if publisher is not None:
                self._let_go_of_all(publisher)

    def remove_publisher(self, publisher_id: str) -> None:
        """Forget a publisher. Nothing happens if it is unknown."""
        with self._lock:
            publisher = self._publishers.pop(publisher_id, None)
            if publisher is not None:
                self._let_go_of_all(publisher)
                del self._id_of_bit[publisher.bit]
                self._all_bits &= ~publisher.bit

    # ---- questions -------------------------------------------------------------------------------

    @property
    def publisher_ids(self) -> list[str]:
        return list(self._publishers)

    def find_prefix(
        self,
        block_hashes: Sequence[ExternalBlockHash],
        group: int | None = None,
        medium: str | None = None,
    ) -> dict[str, int]:
        """How many leading blocks of this sequence each publisher holds, fewest first, if any.

        Args:
            block_hashes: the sequence's, head first, as events carry them or as a `BlockHasher` makes them.
            group: only this KV cache group; None for whichever groups count (see the class).
            medium: only this one; None for any, and then one block may be here and the next there.

        Cost: one dictionary lookup per block and medium, for all publishers at once, up to the first block
        that none of those left holds.
        """
        tables = self._choose_tables(group, medium)
        if not tables or not len(block_hashes):
            return {}
        return self._count_leading([table.find_holders for table in tables], to_wire_hashes(block_hashes))

    def find_best(
        self,
        block_hashes: Sequence[ExternalBlockHash],
        group: int | None = None,
        medium: str | None = None,
    ) -> tuple[str, int] | None:
        """The publisher that holds most leading blocks, the one known longest of several, and how many.

        None if no one holds the first.
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
        group: int | None = None,
        medium: str | None = None,
    ) -> dict[str, int]:
        """How many leading tokens of this prompt each publisher holds, in full blocks; the rest is left out.

        Tokens and not blocks, since publishers may have blocks of different sizes. Works whatever hashes the
        engines use: blocks were named when they were stored, by their tokens and by their parent's name.
        Blocks stored without tokens or behind an unknown parent are not found; lookahead tokens are ignored.

        Args:
            extra_keys: per block what else decides, as in `BlockStored.extra_keys`: (identifier, offset) of
                multimodal inputs, the salt (in the first block); the adapter's name may be left out.
        Raises:
            InvalidArgumentError: the mirror was made without `learns_tokens`.
            InvalidArgumentError, InvalidTypeError: a token that is none.
        Cost: as `find_prefix`, and a hash per block, once for each size of block in use.
        """
        if not self.learns_tokens:
            raise InvalidArgumentError("to find tokens, make the mirror with learns_tokens=True")
        lookups = [table.find_token_holders for table in self._choose_tables(group, medium)]
        found: dict[str, int] = {}
        for block_size in self._held.block_sizes if lookups else ():
            keys = chain_keys(root_key(lora_name), token_ids, block_size, extra_keys, lora_name)
            for publisher_id, num_blocks in self._count_leading(lookups, keys).items():
                found[publisher_id] = max(found.get(publisher_id, 0), num_blocks * block_size)
        return found

    def count_blocks(self, publisher_id: str) -> int:
        """How many hashes it holds, each group and medium counted; 0 for an unknown one."""
        publisher = self._publishers.get(publisher_id)
        return publisher.num_held if publisher else 0

    def count_by_place(self, publisher_id: str) -> dict[tuple[int, str], int]:
        """How many hashes it holds in each (group, medium); {} for an unknown one."""
        with self._lock:
            publisher = self._publishers.get(publisher_id)
            held = publisher.held if publisher else {}
            return {place: len(its_held.keys) for place, its_held in held.items() if its_held.keys}

    def counts_of(self, publisher_id: str) -> PublisherCounts:
        """What its events did. Raises InvalidArgumentError for an unknown one."""
        counts: PublisherCounts = self._known(publisher_id).counts
        return counts

    def state_of(self, publisher_id: str) -> set[tuple[int, str, int]]:
        """All it holds as (group, medium, hash); the empty set for an unknown one. O(what it holds)."""
        with self._lock:
            publisher = self._publishers.get(publisher_id)
            if publisher is None:
                return set()
            return {
                (group, medium, block_hash)
                for (group, medium), held in publisher.held.items()
                for block_hash in held.keys
            }

    # ---- inside ----------------------------------------------------------------------------------

    def _known(self, publisher_id: str) -> TrackedPublisher:
        try:
            return self._publishers[publisher_id]
        except KeyError:
            raise InvalidArgumentError(f"no publisher {publisher_id!r} is known here") from None

    def _get_publisher(self, publisher_id: str, counts_copies: bool | None) -> TrackedPublisher:
        publisher = self._publishers.get(publisher_id)
        if publisher is None:
            bit = 1
            while bit & self._all_bits:
                bit <<= 1
            counting = self.counts_copies if counts_copies is None else counts_copies
            publisher = self._publishers[publisher_id] = TrackedPublisher(bit, counting, PublisherCounts())
            self._id_of_bit[bit] = publisher_id
            self._all_bits |= bit
        return publisher

    def _let_go_of_all(self, publisher: TrackedPublisher) -> None:
        """Forget what a publisher holds, in portions, so that other threads can run in between."""
        for (group, medium), held in publisher.held.items():
            table = held.table
            if table is not None:
                blocks = list(held.keys.items())
                for start in range(0, len(blocks), _CLEAR_AT_ONCE):
                    self._held.leave_table(publisher, table, blocks[start : start + _CLEAR_AT_ONCE])
            self._held.release_table(group, medium, held)
        publisher.held.clear()
        publisher.num_held = 0
        self._held.release_block_sizes(publisher)
        if len(publisher.prefix_groups) >= self._held.max_places:
            publisher.prefix_groups.clear()

    def _choose_tables(self, group: int | None, medium: str | None) -> list[HolderTable]:
        if group is None and medium is None:
            return list(self._held.tables.values())
        wanted = None if medium is None else medium.upper()
        return [
            table
            for (its_group, its_medium), table in self._held.tables.items()
            if group in (None, its_group) and wanted in (None, its_medium)
        ]

    def _count_leading(
        self, lookups: Sequence[Callable[[Sequence[int]], list[int]]], keys: Sequence[int]
    ) -> dict[str, int]:
        """Per publisher, how many of the first `keys` it holds."""
        found: dict[str, int] = {}
        left = self._all_bits
        position = 0
        for start in range(0, len(keys), _LOOK_UP_AT_ONCE):
            held_by = find_holders(lookups, keys[start : start + _LOOK_UP_AT_ONCE])
            bits = held_by[0]
            if held_by.count(bits) == len(held_by) and left & bits == left:
                position += len(held_by)  # the usual case, without a step for each block
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
            if publisher_id is not None:  # not removed meanwhile
                found[publisher_id] = position


def find_holders(lookups: Sequence[Callable[[Sequence[int]], list[int]]], keys: Sequence[int]) -> list[int]:
    """Return for each key the publishers that hold it in any of the tables, as bits."""
    held_by = lookups[0](keys)
    for look_up in lookups[1:]:
        held_by = list(map(or_, held_by, look_up(keys)))
    return held_by
