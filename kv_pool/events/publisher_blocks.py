"""The tables behind a `PrefixMirror`: which publisher holds which hashes and token keys. Compiled.

```text
publisher -> (group, medium) -> PublisherBlocks.held: hash -> token key     removed on a clear
             (group, medium) -> PublisherTable.publishers: hash -> publishers read by lookups
                                PublisherTable.token_publishers: token key -> publishers
```

While a single publisher has blocks in a table, lookups of hashes read its `PublisherBlocks.held`, and
`publishers` is empty: each dict costs a cache miss per block stored and removed.

A set of publishers is an int with one bit per publisher. Hashes, keys and bits are `Any` here: typed ints
would be unboxed and boxed again at each step.
"""

from collections import Counter
from itertools import repeat
from typing import Any

import msgspec

from kv_pool.core.block_keys import make_external_block_hashes
from kv_pool.core.kv_events import MEDIUM_GPU, BlockReported
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.events.place_blocks import ABSENT, HeldHashes
from kv_pool.events.token_keys import chain_keys, count_packed, root_key
from kv_pool.ids import GroupId

PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of groups whose leading blocks form a prefix. A sliding window, for one, drops its first blocks."""

MAX_MEDIUM_CHARS = 64
"""Stores with a longer medium name are rejected."""

_NO_KIND = frozenset({None, "unknown"})
_MAX_64 = 2**64 - 1
_MAX_BIT_SETS = 65536
_MAX_DIGEST_BYTES = 64


class PublisherTable:
    """The publishers that hold each block of one group and medium.

    Attributes:
        num_users: number of publishers with blocks in this table.
        sole: the held hashes and bit of the only publisher so far, while `publishers` is empty; None
            once a second publisher has joined.
    """

    def __init__(self, sole: tuple[dict[Any, Any], Any]) -> None:
        self.publishers: dict[Any, Any] = {}
        self.token_publishers: dict[Any, Any] = {}
        self.num_users = 0
        self.sole: tuple[dict[Any, Any], Any] | None = sole

    def find_publishers(self, hashes: Any) -> list[Any]:
        """Return the publishers that hold each hash, as bits. Lock-free."""
        sole = self.sole
        if sole is not None:
            keys, bit = sole
            return [bit if block_hash in keys else 0 for block_hash in hashes]
        return list(map(self.publishers.get, hashes, repeat(0)))

    def find_token_publishers(self, token_keys: Any) -> list[Any]:
        """Return the publishers that hold each token key, as bits. Lock-free."""
        return list(map(self.token_publishers.get, token_keys, repeat(0)))

    def open(self) -> None:
        """Prepare for a second publisher by filling `publishers`. O(blocks of the first), once."""
        if self.sole is not None:
            keys, bit = self.sole
            self.publishers = dict.fromkeys(keys, bit)  # complete before lookups read it
            self.sole = None


class PublisherBlocks:
    """The blocks that one publisher holds in one group and medium.

    Attributes:
        held: the hashes; the value of each is its token key, None if it is unknown.
        key_copies: token key -> number of hashes beyond the first that map to it, while `table` is set.
        table: the table that lookups read; None for groups that are not looked up.
    """

    def __init__(self) -> None:
        self.held = HeldHashes()
        self.key_copies: dict[Any, int] = {}
        self.table: PublisherTable | None = None


class TrackedPublisher:
    """One publisher of a mirror.

    Attributes:
        bit: its bit in sets of publishers.
        places: its blocks, by group and medium.
        num_held: number of hashes it holds, summed over groups and media.
        prefix_groups: group -> whether its leading blocks form a prefix, for groups of known kind.
        block_sizes: the block sizes that can be found by tokens.
        counts: a `MirrorCounts`.
    """

    def __init__(self, bit: Any, counts_copies: bool, counts: Any) -> None:
        self.bit = bit
        self.counts_copies = counts_copies
        self.places: dict[tuple[GroupId, str], PublisherBlocks] = {}
        self.num_held = 0
        self.prefix_groups: dict[GroupId, bool] = {}
        self.block_sizes: set[int] = set()
        self.counts = counts

    def find_token_key(self, group: GroupId, block_hash: Any) -> Any:
        """Return the token key of this hash in any medium of the group; None if it is unknown."""
        for place, blocks in self.places.items():
            if place[0] == group:
                token_key = blocks.held.values.get(block_hash)
                if token_key is not None:
                    return token_key
        return None


class PublisherTables:
    """The blocks of all publishers of a mirror.

    Attributes:
        tables: by group and medium; replaced, never modified, since lookups iterate over it without a lock.
        num_by_block_size: the block sizes that can be found by tokens, and the number of publishers of each;
            modified in place, since a look-up copies the sizes in one step.
    """

    def __init__(self, learns_tokens: bool, max_places: int, max_block_sizes: int, max_blocks: int) -> None:
        self.learns_tokens = learns_tokens
        self.max_places = max_places
        self.max_block_sizes = max_block_sizes
        self.max_blocks = max_blocks
        self.tables: dict[tuple[GroupId, str], PublisherTable] = {}
        self.num_by_block_size: Counter[int] = Counter()
        # Interned sets of publishers: equal sets are one object.
        self._bit_sets: dict[Any, Any] = {}

    # ---- events ----------------------------------------------------------------------------------

    def apply_stored(self, publisher: TrackedPublisher, event: Any) -> None:
        """Add the blocks of a `BlockStored`. Raises InvalidTypeError; nothing has changed then."""
        counts = publisher.counts
        if is_elsewhere(event.locality):
            counts.num_remote += 1
            return
        hashes = to_wire_hashes(event.block_hashes)
        group = GroupId(event.group_idx or 0)
        medium = to_medium(event.medium)
        blocks = self._get_or_add_blocks(publisher, group, medium)
        if blocks is None:
            counts.num_refused += len(hashes)
            return
        kind = event.kv_cache_spec_kind
        if kind not in _NO_KIND:
            is_prefix = kind in PREFIX_KINDS
            if publisher.prefix_groups.get(group) is not is_prefix:
                self._learn_kind(publisher, group, is_prefix)
        token_keys: list[Any] | None = None
        if self.learns_tokens:
            token_keys = self._find_token_keys(publisher, group, blocks, event, hashes)
        num_fitting = self.max_blocks - publisher.num_held
        if len(hashes) > num_fitting:
            counts.num_refused += len(hashes) - num_fitting
            hashes = hashes[:num_fitting]
        counts_copies = publisher.counts_copies and not isinstance(event, BlockReported)
        values: Any = repeat(None) if token_keys is None else token_keys
        positions = blocks.held.store(hashes, values, counts_copies)
        new = hashes
        if positions is not None:
            new = [hashes[position] for position in positions]
            counts.num_stored_again += len(hashes) - len(new)
            if token_keys is not None:
                self._learn_token_keys(blocks, publisher.bit, hashes, token_keys)
        if blocks.table is not None:
            self._add_to_table(publisher, blocks, blocks.table, new)
        counts.num_stored += len(new)
        publisher.num_held += len(new)
        if not blocks.held.values:
            self.release_table(publisher.places.pop((group, medium)))

    def apply_removed(self, publisher: TrackedPublisher, event: Any) -> None:
        """Remove the blocks of a `BlockRemoved`. Raises InvalidTypeError; nothing has changed then."""
        counts = publisher.counts
        if is_elsewhere(event.locality):
            counts.num_remote += 1
            return
        hashes = to_wire_hashes(event.block_hashes)
        group = GroupId(event.group_idx or 0)
        medium = to_medium(event.medium)
        blocks = publisher.places.get((group, medium))
        if blocks is None:
            counts.num_removed_unknown += len(hashes)
            return
        num_before = len(blocks.held)
        gone, token_keys = blocks.held.remove(hashes)
        num_removed = num_before - len(blocks.held)
        self.remove_from_table(publisher, blocks, gone, token_keys)
        counts.num_removed_unknown += len(gone) - num_removed
        counts.num_removed += num_removed
        publisher.num_held -= num_removed
        if not blocks.held.values:
            self.release_table(publisher.places.pop((group, medium)))

    def remove_from_table(
        self, publisher: TrackedPublisher, blocks: PublisherBlocks, hashes: list[Any], token_keys: list[Any]
    ) -> None:
        """Remove these blocks of a publisher from their table, if they have one; skip `ABSENT` token keys."""
        table = blocks.table
        if table is None or (table.sole is not None and not self.learns_tokens):
            return
        bit = publisher.bit
        for index in range(len(hashes)):
            token_key = token_keys[index]
            if token_key is ABSENT:
                continue
            if table.sole is None:
                self._take_bit(table.publishers, hashes[index], bit)
            if token_key is not None:
                self._drop_token_key(blocks, table, bit, token_key)

    def release_table(self, blocks: PublisherBlocks) -> None:
        """Detach a publisher's blocks from their table; drop the table if no publisher is left in it."""
        table = blocks.table
        blocks.table = None
        blocks.key_copies.clear()
        if table is None:
            return
        table.num_users -= 1
        if not table.num_users:
            self.tables = {place: one for place, one in self.tables.items() if one is not table}

    def release_block_sizes(self, publisher: TrackedPublisher) -> None:
        """Remove the block sizes of this publisher."""
        self.num_by_block_size.subtract(publisher.block_sizes)
        self.num_by_block_size = +self.num_by_block_size  # without those that are left with 0
        publisher.block_sizes.clear()

    # ---- inside ----------------------------------------------------------------------------------

    def _get_or_add_blocks(
        self, publisher: TrackedPublisher, group: GroupId, medium: str
    ) -> PublisherBlocks | None:
        """Return the publisher's blocks in a group and medium; None if a bound is exceeded."""
        blocks = publisher.places.get((group, medium))
        if blocks is None:
            if len(publisher.places) >= self.max_places or len(medium) > MAX_MEDIUM_CHARS:
                return None
            blocks = PublisherBlocks()
            publisher.places[group, medium] = blocks
            if publisher.prefix_groups.get(group, group == 0):
                self._join_table(publisher, group, medium, blocks)
        return blocks

    def _join_table(
        self, publisher: TrackedPublisher, group: GroupId, medium: str, blocks: PublisherBlocks
    ) -> None:
        table = self.tables.get((group, medium))
        if table is None:
            table = PublisherTable((blocks.held.values, publisher.bit))
            self.tables = {**self.tables, (group, medium): table}
        else:
            table.open()
        table.num_users += 1
        blocks.table = table
        self._add_to_table(publisher, blocks, table, blocks.held.values)

    def _add_to_table(
        self, publisher: TrackedPublisher, blocks: PublisherBlocks, table: PublisherTable, hashes: Any
    ) -> None:
        """Add held hashes of a publisher, and their token keys, to a table that does not have them yet."""
        bit = publisher.bit
        if table.sole is None:
            publishers = table.publishers
            for block_hash in hashes:
                bits = publishers.setdefault(block_hash, bit)
                if bits is not bit:
                    publishers[block_hash] = self._share(bits | bit)
        if self.learns_tokens:
            token_keys = blocks.held.values
            for block_hash in hashes:
                token_key = token_keys[block_hash]
                if token_key is not None:
                    self._add_token_key(blocks, table, bit, token_key)

    def _learn_token_keys(
        self, blocks: PublisherBlocks, bit: Any, hashes: Any, token_keys: list[Any]
    ) -> None:
        """Set the token keys of hashes that were stored before without known tokens."""
        known = blocks.held.values
        for index in range(len(hashes)):
            block_hash = hashes[index]
            if known[block_hash] is None and token_keys[index] is not None:
                known[block_hash] = token_keys[index]
                if blocks.table is not None:
                    self._add_token_key(blocks, blocks.table, bit, token_keys[index])

    def _learn_kind(self, publisher: TrackedPublisher, group: GroupId, is_prefix: bool) -> None:
        """Record whether lookups include a group's blocks from now on."""
        if group not in publisher.prefix_groups and len(publisher.prefix_groups) >= self.max_places:
            return  # bounds memory if a publisher keeps naming new groups
        publisher.prefix_groups[group] = is_prefix
        for place, blocks in publisher.places.items():
            if place[0] != group or is_prefix == (blocks.table is not None):
                continue
            if is_prefix:
                self._join_table(publisher, group, place[1], blocks)
            else:
                values = blocks.held.values
                self.remove_from_table(publisher, blocks, list(values), list(values.values()))
                self.release_table(blocks)

    def _find_token_keys(
        self, publisher: TrackedPublisher, group: GroupId, blocks: PublisherBlocks, event: Any, hashes: Any
    ) -> list[Any] | None:
        """Return the token keys of the event's blocks; None if they cannot be computed."""
        counts = publisher.counts
        lora_name = event.lora_name
        if lora_name is None and event.lora_id:
            return None  # the adapter's name, which is part of the key, is unknown; 0 means no adapter
        token_ids = event.token_ids
        if isinstance(token_ids, msgspec.Raw):
            token_ids = bytes(token_ids)
            num_tokens = count_packed(token_ids)
        else:
            num_tokens = len(token_ids)
        if num_tokens == 0:
            # A block that moved to another medium may have no tokens; its hash identifies it.
            return [publisher.find_token_key(group, one) for one in hashes]
        block_size: int = event.block_size
        if block_size < 1 or num_tokens != len(hashes) * block_size:
            return None  # the span has holes: which tokens belong to which block is unknown
        if block_size not in publisher.block_sizes:
            if len(publisher.block_sizes) >= self.max_block_sizes:
                counts.num_refused_sizes += len(hashes)
                return None
            publisher.block_sizes.add(block_size)
            self.num_by_block_size[block_size] += 1
        parent: Any
        if event.parent_block_hash is None:
            parent = root_key(lora_name)
        else:
            parent_hash = to_wire_hash(event.parent_block_hash)
            parent = blocks.held.values.get(parent_hash)
            if parent is None:
                parent = publisher.find_token_key(group, parent_hash)
            if parent is None:
                counts.num_unknown_parents += 1
                return None
        try:
            return chain_keys(parent, token_ids, block_size, event.extra_keys, lora_name)
        except (InvalidArgumentError, InvalidTypeError, ValueError):
            return None  # placeholders below 0 instead of tokens, or invalid tokens

    def _add_token_key(
        self, blocks: PublisherBlocks, table: PublisherTable, bit: Any, token_key: Any
    ) -> None:
        publishers = table.token_publishers
        num_before = len(publishers)
        bits = publishers.setdefault(token_key, bit)
        if len(publishers) > num_before:
            return
        if bits & bit:
            # Several hashes may map to one key: the engine may hash inputs that are unknown here.
            blocks.key_copies[token_key] = blocks.key_copies.get(token_key, 0) + 1
        else:
            publishers[token_key] = self._share(bits | bit)

    def _drop_token_key(
        self, blocks: PublisherBlocks, table: PublisherTable, bit: Any, token_key: Any
    ) -> None:
        key_copies = blocks.key_copies
        if key_copies and token_key in key_copies:
            num_copies = key_copies[token_key]
            if num_copies == 1:
                del key_copies[token_key]
            else:
                key_copies[token_key] = num_copies - 1
            return
        self._take_bit(table.token_publishers, token_key, bit)

    def _take_bit(self, publishers: dict[Any, Any], key: Any, bit: Any) -> None:
        bits = publishers[key]
        if bits is bit or bits == bit:
            del publishers[key]
        else:
            publishers[key] = self._share(bits & ~bit)

    def _share(self, bits: Any) -> Any:
        """Return an interned int equal to `bits`, shared by all blocks with the same publishers."""
        if len(self._bit_sets) > _MAX_BIT_SETS:
            self._bit_sets.clear()
        return self._bit_sets.setdefault(bits, bits)


def is_elsewhere(locality: str | None) -> bool:
    """Return True if the event is about blocks that are not local to the publisher."""
    return locality is not None and locality.upper() != "LOCAL"


def to_medium(medium: str | None) -> str:
    """Return the name of a medium in upper case; GPU for None."""
    return MEDIUM_GPU if medium is None or medium == MEDIUM_GPU else medium.upper()


def to_wire_hash(block_hash: Any) -> Any:
    """Return a block hash as an unsigned 64-bit number. Raises InvalidTypeError."""
    if isinstance(block_hash, int):
        return block_hash & _MAX_64
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    raise InvalidTypeError(f"a block hash is a {type(block_hash).__name__}; hashes are ints or bytes")


def to_wire_hashes(block_hashes: Any) -> Any:
    """Return hashes as a list of unsigned 64-bit numbers; the same object if it is such a list already."""
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
