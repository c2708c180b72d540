"""`PrefixMirror`: which publisher holds which blocks, learned from their event streams alone."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import or_
from typing import Any

from kv_pool.core.block_keys import make_external_block_hashes
from kv_pool.core.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockReported, BlockStored
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.events.token_keys import chain_keys, root_key
from kv_pool.ids import ExternalBlockHash

PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of groups whose leading blocks are a prefix. A window drops its first blocks, for instance."""

_NO_KIND = frozenset({None, "unknown"})
_MAX_64 = 2**64 - 1
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
        num_remote: events about blocks that are somewhere else, left out.
        num_clears: `AllBlocksCleared` events.
    """

    num_batches: int = 0
    num_stored: int = 0
    num_removed: int = 0
    num_stored_again: int = 0
    num_removed_unknown: int = 0
    num_unknown_parents: int = 0
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

    Calls that change may come from any thread. Lookups take no lock: they see each block as it was before or
    after a change that runs meanwhile.
    Memory: 90 to 120 bytes for each block and publisher that holds it, twice that with tokens.
    """

    def __init__(self, learns_tokens: bool = False, counts_copies: bool = False) -> None:
        self.learns_tokens = learns_tokens
        self.counts_copies = counts_copies
        self._publishers: dict[str, _Publisher] = {}
        self._id_of_bit: dict[int, str] = {}
        self._all_bits = 0
        self._tables: dict[tuple[int, str], _Table] = {}
        # Sets of publishers as they occur, so that equal ones are one object.
        self._bit_sets: dict[int, int] = {}
        self._block_sizes: tuple[int, ...] = ()
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
                    self._apply_stored(publisher, event)
                elif isinstance(event, BlockRemoved):
                    self._apply_removed(publisher, event)
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
        return self._count_leading([table.holders.get for table in tables], to_wire_hashes(block_hashes))

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
        lookups = [table.token_holders.get for table in self._choose_tables(group, medium)]
        found: dict[str, int] = {}
        for block_size in self._block_sizes if lookups else ():
            keys = chain_keys(root_key(lora_name), token_ids, block_size, extra_keys, lora_name)
            for publisher_id, num_blocks in self._count_leading(lookups, keys).items():
                found[publisher_id] = max(found.get(publisher_id, 0), num_blocks * block_size)
        return found

    def count_blocks(self, publisher_id: str) -> int:
        """How many hashes it holds, each group and medium counted; 0 for an unknown one."""
        publisher = self._publishers.get(publisher_id)
        return sum(len(held.keys) for held in list(publisher.held.values())) if publisher else 0

    def count_by_place(self, publisher_id: str) -> dict[tuple[int, str], int]:
        """How many hashes it holds in each (group, medium); {} for an unknown one."""
        with self._lock:
            publisher = self._publishers.get(publisher_id)
            held = publisher.held if publisher else {}
            return {place: len(its_held.keys) for place, its_held in held.items() if its_held.keys}

    def counts_of(self, publisher_id: str) -> PublisherCounts:
        """What its events did. Raises InvalidArgumentError for an unknown one."""
        return self._known(publisher_id).counts

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

    def _known(self, publisher_id: str) -> "_Publisher":
        try:
            return self._publishers[publisher_id]
        except KeyError:
            raise InvalidArgumentError(f"no publisher {publisher_id!r} is known here") from None

    def _get_publisher(self, publisher_id: str, counts_copies: bool | None) -> "_Publisher":
        publisher = self._publishers.get(publisher_id)
        if publisher is None:
            bit = 1
            while bit & self._all_bits:
                bit <<= 1
            counting = self.counts_copies if counts_copies is None else counts_copies
            publisher = self._publishers[publisher_id] = _Publisher(bit, counting)
            self._id_of_bit[bit] = publisher_id
            self._all_bits |= bit
        return publisher

    def _get_held(self, publisher: "_Publisher", group: int, medium: str) -> "_Held":
        held = publisher.held.get((group, medium))
        if held is None:
            held = publisher.held[group, medium] = _Held()
            if is_prefix_group(group, publisher.kinds.get(group)):
                held.table = self._get_table(group, medium)
        return held

    def _get_table(self, group: int, medium: str) -> "_Table":
        table = self._tables.get((group, medium))
        if table is None:
            # A new dict, since lookups may be walking the old one.
            self._tables = {**self._tables, (group, medium): (table := _Table())}
        return table

    def _choose_tables(self, group: int | None, medium: str | None) -> list["_Table"]:
        if group is None and medium is None:
            return list(self._tables.values())
        wanted = None if medium is None else medium.upper()
        return [
            table
            for (its_group, its_medium), table in self._tables.items()
            if group in (None, its_group) and wanted in (None, its_medium)
        ]

    def _count_leading(
        self, lookups: Sequence[Callable[[int, int], int]], keys: Sequence[int]
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
        self._note(found, left, position)
        return found

    def _note(self, found: dict[str, int], bits: int, position: int) -> None:
        while bits:
            bit = bits & -bits
            bits ^= bit
            publisher_id = self._id_of_bit.get(bit)
            if publisher_id is not None:  # not removed meanwhile
                found[publisher_id] = position

    def _apply_stored(self, publisher: "_Publisher", event: BlockStored) -> None:
        counts = publisher.counts
        if is_elsewhere(event.locality):
            counts.num_remote += 1
            return
        group = event.group_idx or 0
        kind = event.kv_cache_spec_kind
        if kind not in _NO_KIND and publisher.kinds.get(group) != kind:
            self._learn_kind(publisher, group, str(kind))
        held = self._get_held(publisher, group, to_medium(event.medium))
        token_keys: list[int | None] | None = None
        if self.learns_tokens:
            token_keys = self._name_blocks(publisher, group, held, event)
        keys = held.keys
        bit = publisher.bit
        holders = None if held.table is None else held.table.holders
        counting = publisher.counts_copies and not isinstance(event, BlockReported)
        num_stored = 0
        for position, block_hash in enumerate(event.block_hashes):
            if not isinstance(block_hash, int) or block_hash < 0:
                block_hash = to_wire_hash(block_hash)
            token_key = None if token_keys is None else token_keys[position]
            if block_hash in keys:
                counts.num_stored_again += 1
                if counting:
                    held.copies[block_hash] = held.copies.get(block_hash, 0) + 1
                if token_key is not None and keys[block_hash] is None:
                    keys[block_hash] = token_key  # what could not be placed the first time
                    self._add_token_key(held, bit, token_key)
                continue
            keys[block_hash] = token_key
            num_stored += 1
            if holders is not None:
                bits = holders.get(block_hash)
                holders[block_hash] = bit if bits is None else self._one_object(bits | bit)
            if token_key is not None:
                self._add_token_key(held, bit, token_key)
        counts.num_stored += num_stored

    def _apply_removed(self, publisher: "_Publisher", event: BlockRemoved) -> None:
        counts = publisher.counts
        if is_elsewhere(event.locality):
            counts.num_remote += 1
            return
        held = publisher.held.get((event.group_idx or 0, to_medium(event.medium)))
        for block_hash in event.block_hashes:
            wire_hash = to_wire_hash(block_hash)
            if held is None or wire_hash not in held.keys:
                counts.num_removed_unknown += 1
                continue
            if held.copies:
                copies = held.copies.get(wire_hash, 0)
                if copies:
                    if copies == 1:
                        del held.copies[wire_hash]
                    else:
                        held.copies[wire_hash] = copies - 1
                    continue
            token_key = held.keys.pop(wire_hash)
            counts.num_removed += 1
            if held.table is not None:
                self._take_bit(held.table.holders, wire_hash, publisher.bit)
            if token_key is not None:
                self._drop_token_key(held, publisher.bit, token_key)

    def _name_blocks(
        self, publisher: "_Publisher", group: int, held: "_Held", event: BlockStored
    ) -> list[int | None] | None:
        """The token keys of the event's blocks; None where they can not be known."""
        num_blocks = len(event.block_hashes)
        block_size = event.block_size
        if not event.token_ids:
            # A block that moved to another medium may come without tokens, but its hash says which it is.
            return [publisher.find_token_key(group, to_wire_hash(one)) for one in event.block_hashes]
        if block_size < 1 or len(event.token_ids) != num_blocks * block_size:
            return None  # blocks were left out of the span: which tokens are whose is not known
        parent: int | None
        if event.parent_block_hash is None:
            parent = root_key(event.lora_name)
        else:
            parent_hash = to_wire_hash(event.parent_block_hash)
            parent = held.keys.get(parent_hash)
            if parent is None:
                parent = publisher.find_token_key(group, parent_hash)
            if parent is None:
                publisher.counts.num_unknown_parents += 1
                return None
        try:
            keys = chain_keys(parent, event.token_ids, block_size, event.extra_keys, event.lora_name)
        except InvalidArgumentError:
            return None  # placeholders below 0 in place of tokens
        if block_size not in self._block_sizes:
            self._block_sizes = (*self._block_sizes, block_size)
        return [*keys]

    def _add_token_key(self, held: "_Held", bit: int, token_key: int) -> None:
        if token_key in held.num_by_token_key:
            held.num_by_token_key[token_key] += 1
            return
        held.num_by_token_key[token_key] = 1
        if held.table is not None:
            holders = held.table.token_holders
            bits = holders.get(token_key)
            holders[token_key] = bit if bits is None else self._one_object(bits | bit)

    def _drop_token_key(self, held: "_Held", bit: int, token_key: int) -> None:
        # Several hashes may lead to one key: the engine may hash more than we know of.
        num_left = held.num_by_token_key[token_key] - 1
        if num_left:
            held.num_by_token_key[token_key] = num_left
            return
        del held.num_by_token_key[token_key]
        if held.table is not None:
            self._take_bit(held.table.token_holders, token_key, bit)

    def _take_bit(self, holders: dict[int, int], key: int, bit: int) -> None:
        bits = holders[key] & ~bit
        if bits:
            holders[key] = self._one_object(bits)
        else:
            del holders[key]

    def _one_object(self, bits: int) -> int:
        if len(self._bit_sets) > 65536:
            self._bit_sets.clear()
        return self._bit_sets.setdefault(bits, bits)

    def _learn_kind(self, publisher: "_Publisher", group: int, kind: str) -> None:
        """A group's blocks are looked up from now on, or no longer, if its kind says so."""
        publisher.kinds[group] = kind
        for (its_group, medium), held in publisher.held.items():
            if its_group != group or is_prefix_group(group, kind) == (held.table is not None):
                continue
            if held.table is not None:
                self._leave_table(publisher, held)
                held.table = None
            else:
                held.table = self._get_table(group, medium)
                for holders, keys in (
                    (held.table.holders, held.keys),
                    (held.table.token_holders, held.num_by_token_key),
                ):
                    for key in keys:
                        holders[key] = self._one_object(holders.get(key, 0) | publisher.bit)

    def _let_go_of_all(self, publisher: "_Publisher") -> None:
        for held in publisher.held.values():
            self._leave_table(publisher, held)
        publisher.held.clear()

    def _leave_table(self, publisher: "_Publisher", held: "_Held") -> None:
        if held.table is None:
            return
        bit = publisher.bit
        for holders, keys in (
            (held.table.holders, held.keys),
            (held.table.token_holders, held.num_by_token_key),
        ):
            for key in keys:
                bits = holders[key]
                if bits == bit:
                    del holders[key]
                else:
                    holders[key] = self._one_object(bits & ~bit)


@dataclass(slots=True)
class _Table:
    """Who holds what in one group and medium: a bit per publisher."""

    holders: dict[int, int] = field(default_factory=dict)
    token_holders: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Held:
    """What one publisher holds in one group and medium.

    Attributes:
        keys: hash -> the key of its tokens, None where that is not known.
        copies: hash -> copies beyond the first.
        num_by_token_key: key -> how many hashes lead to it.
        table: where it is looked up; None for groups that are not.
    """

    keys: dict[int, int | None] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    num_by_token_key: dict[int, int] = field(default_factory=dict)
    table: _Table | None = None


@dataclass(slots=True)
class _Publisher:
    bit: int
    counts_copies: bool
    held: dict[tuple[int, str], _Held] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    counts: PublisherCounts = field(default_factory=PublisherCounts)

    def find_token_key(self, group: int, block_hash: int) -> int | None:
        """The key of this hash in any medium of the group."""
        for (its_group, _), held in self.held.items():
            if its_group == group:
                token_key = held.keys.get(block_hash)
                if token_key is not None:
                    return token_key
        return None


def find_holders(lookups: Sequence[Callable[[int, int], int]], keys: Sequence[int]) -> list[int]:
    """For each key the publishers that hold it in any of the tables, as bits."""
    held_by = list(map(lookups[0], keys, repeat(0)))
    for look_up in lookups[1:]:
        held_by = list(map(or_, held_by, map(look_up, keys, repeat(0))))
    return held_by


def is_prefix_group(group: int, kind: str | None) -> bool:
    """Are the leading blocks of this group a prefix that can be hit? Without a kind: those of group 0."""
    return group == 0 if kind is None else kind in PREFIX_KINDS


def is_elsewhere(locality: str | None) -> bool:
    """Is the event about blocks that are not at the publisher?"""
    return locality is not None and locality.upper() != "LOCAL"


def to_medium(medium: str | None) -> str:
    """The medium's name in upper case; GPU for none."""
    return MEDIUM_GPU if medium is None or medium == MEDIUM_GPU else medium.upper()


def to_wire_hash(block_hash: ExternalBlockHash) -> int:
    """A block hash as an unsigned 64-bit number. Raises InvalidTypeError."""
    if isinstance(block_hash, int):
        return block_hash & _MAX_64
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    raise InvalidTypeError(f"a block hash is a {type(block_hash).__name__}; hashes are ints or bytes")


def to_wire_hashes(block_hashes: Sequence[ExternalBlockHash]) -> Sequence[int]:
    """The hashes of a sequence as unsigned 64-bit numbers; the same object if they are. All of one type."""
    listed: Any = block_hashes.tolist() if hasattr(block_hashes, "tolist") else block_hashes
    if isinstance(listed[0], bytes):
        return make_external_block_hashes(listed, 0)
    try:
        if min(listed) >= 0:
            return listed  # type: ignore[no-any-return]
    except TypeError:
        pass
    return [to_wire_hash(one) for one in listed]
