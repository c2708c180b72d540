"""The tables behind a `PrefixMirror`: which publisher holds which hashes and token keys. Compiled.

```text
publisher -> (group, medium) -> HeldBlocks.keys: hash -> token key         what to forget on a clear
             (group, medium) -> HolderTable.holders: hash -> publishers    what lookups read
                                HolderTable.token_holders: token key -> publishers
```

While one publisher alone has blocks in a table, lookups of hashes read its `HeldBlocks.keys`; `holders` is
empty, since each dict costs a cache miss per block stored and removed.

A set of publishers is an int with a bit for each. Hashes, keys and bits are `Any` here: as typed ints they
would be converted and created again at each step.
"""

from itertools import repeat
from typing import Any

import msgspec

from kv_pool.core.block_keys import make_external_block_hashes
from kv_pool.core.kv_events import MEDIUM_GPU, BlockReported
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.events.token_keys import chain_keys, count_packed, root_key

PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of groups whose leading blocks are a prefix. A window drops its first blocks, for instance."""

MAX_MEDIUM_CHARS = 64
"""Longer names of media are refused."""

_NO_KIND = frozenset({None, "unknown"})
_ABSENT: Any = object()
_MAX_64 = 2**64 - 1
_MAX_BIT_SETS = 65536
_MAX_DIGEST_BYTES = 64


class HolderTable:
    """The publishers that hold each block of one group and medium.

    Attributes:
        num_users: publishers that hold blocks in here.
        sole: while there was one publisher only, its `HeldBlocks.keys` and its bit; `holders` is empty then.
    """

    def __init__(self, sole: tuple[dict[Any, Any], Any]) -> None:
        self.holders: dict[Any, Any] = {}
        self.token_holders: dict[Any, Any] = {}
        self.num_users = 0
        self.sole: tuple[dict[Any, Any], Any] | None = sole

    def find_holders(self, hashes: Any) -> list[Any]:
        """Return for each hash the publishers that hold it, as bits. Needs no lock."""
        sole = self.sole
        if sole is not None:
            keys, bit = sole
            return [bit if block_hash in keys else 0 for block_hash in hashes]
        return list(map(self.holders.get, hashes, repeat(0)))

    def find_token_holders(self, token_keys: Any) -> list[Any]:
        """Return for each token key the publishers that hold it, as bits. Needs no lock."""
        return list(map(self.token_holders.get, token_keys, repeat(0)))

    def open(self) -> None:
        """Get ready for a second publisher. O(blocks of the first), once."""
        if self.sole is not None:
            keys, bit = self.sole
            self.holders = dict.fromkeys(keys, bit)  # complete before it is read
            self.sole = None


class HeldBlocks:
    """What one publisher holds in one group and medium.

    Attributes:
        keys: hash -> the key of its tokens, None where that is not known.
        copies: hash -> copies beyond the first.
        key_copies: token key -> hashes beyond the first that lead to it, while `table` is set.
        table: where it is looked up; None for groups that are not.
    """

    def __init__(self) -> None:
        self.keys: dict[Any, Any] = {}
        self.copies: dict[Any, int] = {}
        self.key_copies: dict[Any, int] = {}
        self.table: HolderTable | None = None


class TrackedPublisher:
    """One publisher of a mirror.

    Attributes:
        bit: its bit in sets of publishers.
        held: what it holds, by group and medium.
        num_held: hashes that it holds, each group and medium counted.
        prefix_groups: of the groups whose kind is known, whether their leading blocks are a prefix.
        block_sizes: the sizes of the blocks that are findable by tokens.
        counts: a `PublisherCounts`.
    """

    def __init__(self, bit: Any, counts_copies: bool, counts: Any) -> None:
        self.bit = bit
        self.counts_copies = counts_copies
        self.held: dict[tuple[int, str], HeldBlocks] = {}
        self.num_held = 0
        self.prefix_groups: dict[int, bool] = {}
        self.block_sizes: set[int] = set()
        self.counts = counts

    def find_token_key(self, group: int, block_hash: Any) -> Any:
        """Return the token key of this hash in any medium of the group, None if it is not known."""
        for place, held in self.held.items():
            if place[0] == group:
                token_key = held.keys.get(block_hash)
                if token_key is not None:
                    return token_key
        return None


class HolderTables:
    """All that the publishers of a mirror hold.

    Attributes:
        tables: by group and medium; replaced, never changed, since lookups walk it without a lock.
        block_sizes: the sizes of blocks that are findable by tokens, of all publishers.
    """

    def __init__(self, learns_tokens: bool, max_places: int, max_block_sizes: int, max_blocks: int) -> None:
        self.learns_tokens = learns_tokens
        self.max_places = max_places
        self.max_block_sizes = max_block_sizes
        self.max_blocks = max_blocks
        self.tables: dict[tuple[int, str], HolderTable] = {}
        self.block_sizes: tuple[int, ...] = ()
        self._num_by_block_size: dict[int, int] = {}
        # Sets of publishers as they occur, so that equal ones are one object.
        self._bit_sets: dict[Any, Any] = {}

    # ---- events ----------------------------------------------------------------------------------

    def apply_stored(self, publisher: TrackedPublisher, event: Any) -> None:
        """Hold the blocks of a `BlockStored`. Raises InvalidTypeError, with nothing changed."""
        counts = publisher.counts
        if is_elsewhere(event.locality):
            counts.num_remote += 1
            return
        hashes = to_wire_hashes(event.block_hashes)
        group: int = event.group_idx or 0
        medium = to_medium(event.medium)
        held = self._get_held(publisher, group, medium)
        if held is None:
            counts.num_refused += len(hashes)
            return
        kind = event.kv_cache_spec_kind
        if kind not in _NO_KIND:
            is_prefix = kind in PREFIX_KINDS
            if publisher.prefix_groups.get(group) is not is_prefix:
                self._learn_kind(publisher, group, is_prefix)
        token_keys: list[Any] | None = None
        if self.learns_tokens:
            token_keys = self._find_token_keys(publisher, group, held, event, hashes)
        num_fitting = self.max_blocks - publisher.num_held
        if len(hashes) > num_fitting:
            counts.num_refused += len(hashes) - num_fitting
            hashes = hashes[:num_fitting]
        keys = held.keys
        bit = publisher.bit
        table = held.table
        holders = None if table is None or table.sole is not None else table.holders
        num_before = len(keys)
        num_held = num_before
        position = -1
        token_key: Any = None
        for block_hash in hashes:
            position += 1
            if token_keys is not None:
                token_key = token_keys[position]
            # One look-up per dict: with many blocks each of them is a cache miss.
            keys.setdefault(block_hash, token_key)
            if len(keys) == num_held:
                counts.num_stored_again += 1
                if publisher.counts_copies and not isinstance(event, BlockReported):
                    held.copies[block_hash] = held.copies.get(block_hash, 0) + 1
                if token_key is not None and keys[block_hash] is None:
                    keys[block_hash] = token_key  # the first store could not be placed
                    if table is not None:
                        self._add_token_key(held, table, bit, token_key)
                continue
            num_held += 1
            if holders is not None:
                bits = holders.setdefault(block_hash, bit)
                if bits is not bit:
                    holders[block_hash] = self._share(bits | bit)
            if token_key is not None and table is not None:
                self._add_token_key(held, table, bit, token_key)
        counts.num_stored += num_held - num_before
        publisher.num_held += num_held - num_before
        if not keys:
            self._drop_held(publisher, group, medium)

    def apply_removed(self, publisher: TrackedPublisher, event: Any) -> None:
        """Forget the blocks of a `BlockRemoved`. Raises InvalidTypeError, with nothing changed."""
        counts = publisher.counts
        if is_elsewhere(event.locality):
            counts.num_remote += 1
            return
        hashes = to_wire_hashes(event.block_hashes)
        group: int = event.group_idx or 0
        medium = to_medium(event.medium)
        held = publisher.held.get((group, medium))
        if held is None:
            counts.num_removed_unknown += len(hashes)
            return
        keys = held.keys
        copies = held.copies
        bit = publisher.bit
        table = held.table
        holders = None if table is None or table.sole is not None else table.holders
        num_before = len(keys)
        pop = keys.pop
        for block_hash in hashes:
            if copies and block_hash in copies:
                num_copies = copies[block_hash]
                if num_copies == 1:
                    del copies[block_hash]
                else:
                    copies[block_hash] = num_copies - 1
                continue
            token_key = pop(block_hash, _ABSENT)
            if token_key is _ABSENT:
                counts.num_removed_unknown += 1
                continue
            if holders is not None:
                self._take_bit(holders, block_hash, bit)
            if token_key is not None and table is not None:
                self._drop_token_key(held, table, bit, token_key)
        counts.num_removed += num_before - len(keys)
        publisher.num_held -= num_before - len(keys)
        if not keys:
            self._drop_held(publisher, group, medium)

    def leave_table(self, publisher: TrackedPublisher, table: HolderTable, blocks: list[Any]) -> None:
        """Take a publisher off these (hash, token key) pairs of a table that it is about to leave."""
        bit = publisher.bit
        for block_hash, token_key in blocks:
            if table.sole is None:
                self._take_bit(table.holders, block_hash, bit)
            if token_key is not None and token_key in table.token_holders:
                self._take_bit(table.token_holders, token_key, bit)

    def release_table(self, group: int, medium: str, held: HeldBlocks) -> None:
        """Drop the table of a publisher's blocks when no other publisher has blocks in it."""
        table = held.table
        held.table = None
        held.key_copies.clear()
        if table is None:
            return
        table.num_users -= 1
        if not table.num_users:
            self.tables = {place: one for place, one in self.tables.items() if one is not table}

    def release_block_sizes(self, publisher: TrackedPublisher) -> None:
        """Forget which sizes of blocks this publisher has."""
        for block_size in publisher.block_sizes:
            self._num_by_block_size[block_size] -= 1
            if not self._num_by_block_size[block_size]:
                del self._num_by_block_size[block_size]
        publisher.block_sizes.clear()
        self.block_sizes = tuple(self._num_by_block_size)

    # ---- inside ----------------------------------------------------------------------------------

    def _get_held(self, publisher: TrackedPublisher, group: int, medium: str) -> HeldBlocks | None:
        """Return what the publisher holds there; None beyond the bounds."""
        held = publisher.held.get((group, medium))
        if held is None:
            if len(publisher.held) >= self.max_places or len(medium) > MAX_MEDIUM_CHARS:
                return None
            held = HeldBlocks()
            publisher.held[group, medium] = held
            if publisher.prefix_groups.get(group, group == 0):
                self._join_table(publisher, group, medium, held)
        return held

    def _drop_held(self, publisher: TrackedPublisher, group: int, medium: str) -> None:
        """Forget a group and medium without blocks."""
        self.release_table(group, medium, publisher.held.pop((group, medium)))

    def _join_table(self, publisher: TrackedPublisher, group: int, medium: str, held: HeldBlocks) -> None:
        table = self.tables.get((group, medium))
        if table is None:
            table = HolderTable((held.keys, publisher.bit))
            self.tables = {**self.tables, (group, medium): table}
        else:
            table.open()
        table.num_users += 1
        held.table = table
        for block_hash, token_key in held.keys.items():
            if table.sole is None:
                bits = table.holders.get(block_hash, 0)
                table.holders[block_hash] = self._share(bits | publisher.bit)
            if token_key is not None:
                self._add_token_key(held, table, publisher.bit, token_key)

    def _learn_kind(self, publisher: TrackedPublisher, group: int, is_prefix: bool) -> None:
        """Look a group's blocks up from now on, or no longer."""
        if group not in publisher.prefix_groups and len(publisher.prefix_groups) >= self.max_places:
            return  # groups come and go without end; those without blocks are not known any more
        publisher.prefix_groups[group] = is_prefix
        for place, held in publisher.held.items():
            table = held.table
            if place[0] != group or is_prefix == (table is not None):
                continue
            if table is not None:
                self.leave_table(publisher, table, list(held.keys.items()))
                self.release_table(group, place[1], held)
            else:
                self._join_table(publisher, group, place[1], held)

    def _find_token_keys(
        self, publisher: TrackedPublisher, group: int, held: HeldBlocks, event: Any, hashes: Any
    ) -> list[Any] | None:
        """Return the token keys of the event's blocks; None where they cannot be known."""
        counts = publisher.counts
        token_ids = event.token_ids
        if isinstance(token_ids, msgspec.Raw):
            token_ids = bytes(token_ids)
            num_tokens = count_packed(token_ids)
        else:
            num_tokens = len(token_ids)
        if num_tokens == 0:
            # A block that moved to another medium may come without tokens; its hash identifies it.
            return [publisher.find_token_key(group, one) for one in hashes]
        block_size: int = event.block_size
        if block_size < 1 or num_tokens != len(hashes) * block_size:
            return None  # blocks were left out of the span: which tokens belong to which is not known
        if block_size not in publisher.block_sizes:
            if len(publisher.block_sizes) >= self.max_block_sizes:
                counts.num_refused_sizes += len(hashes)
                return None
            publisher.block_sizes.add(block_size)
            self._num_by_block_size[block_size] = self._num_by_block_size.get(block_size, 0) + 1
            self.block_sizes = tuple(self._num_by_block_size)
        lora_name = event.lora_name
        parent: Any
        if event.parent_block_hash is None:
            parent = root_key(lora_name)
        else:
            parent_hash = to_wire_hash(event.parent_block_hash)
            parent = held.keys.get(parent_hash)
            if parent is None:
                parent = publisher.find_token_key(group, parent_hash)
            if parent is None:
                counts.num_unknown_parents += 1
                return None
        try:
            return chain_keys(parent, token_ids, block_size, event.extra_keys, lora_name)
        except (InvalidArgumentError, InvalidTypeError, ValueError):
            return None  # placeholders below 0 in place of tokens, or no tokens at all

    def _add_token_key(self, held: HeldBlocks, table: HolderTable, bit: Any, token_key: Any) -> None:
        holders = table.token_holders
        num_before = len(holders)
        bits = holders.setdefault(token_key, bit)
        if len(holders) > num_before:
            return
        if bits & bit:
            # Several hashes may lead to one key: the engine may hash more than is known here.
            held.key_copies[token_key] = held.key_copies.get(token_key, 0) + 1
        else:
            holders[token_key] = self._share(bits | bit)

    def _drop_token_key(self, held: HeldBlocks, table: HolderTable, bit: Any, token_key: Any) -> None:
        key_copies = held.key_copies
        if key_copies and token_key in key_copies:
            num_copies = key_copies[token_key]
            if num_copies == 1:
                del key_copies[token_key]
            else:
                key_copies[token_key] = num_copies - 1
            return
        self._take_bit(table.token_holders, token_key, bit)

    def _take_bit(self, holders: dict[Any, Any], key: Any, bit: Any) -> None:
        bits = holders[key]
        if bits is bit or bits == bit:
            del holders[key]
        else:
            holders[key] = self._share(bits & ~bit)

    def _share(self, bits: Any) -> Any:
        """Return an int equal to `bits`, the same object for all blocks that these publishers hold."""
        if len(self._bit_sets) > _MAX_BIT_SETS:
            self._bit_sets.clear()
        return self._bit_sets.setdefault(bits, bits)


def is_elsewhere(locality: str | None) -> bool:
    """Return True if the event is about blocks that are not at the publisher."""
    return locality is not None and locality.upper() != "LOCAL"


def to_medium(medium: str | None) -> str:
    """Return the medium's name in upper case; GPU for none."""
    return MEDIUM_GPU if medium is None or medium == MEDIUM_GPU else medium.upper()


def to_wire_hash(block_hash: Any) -> Any:
    """Return a block hash as an unsigned 64-bit number. Raises InvalidTypeError."""
    if isinstance(block_hash, int):
        return block_hash & _MAX_64
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    raise InvalidTypeError(f"a block hash is a {type(block_hash).__name__}; hashes are ints or bytes")


def to_wire_hashes(block_hashes: Any) -> Any:
    """Return hashes as unsigned 64-bit numbers; the same object if they are, or are a NumPy array of them."""
    listed: Any = block_hashes
    if not isinstance(listed, list) and hasattr(listed, "tolist"):
        listed = listed.tolist()
    if not len(listed):
        return listed
    if isinstance(listed[0], bytes) and len(listed[0]) <= _MAX_DIGEST_BYTES:
        try:
            return make_external_block_hashes(listed, 0)
        except (TypeError, ValueError, IndexError):
            return [to_wire_hash(one) for one in listed]
    try:
        if min(listed) >= 0:
            return listed
    except TypeError:
        pass
    return [to_wire_hash(one) for one in listed]
