"""`HeldHashes`: the hashes at one place. `PlaceBlocks`: with their parents, children and fields. Compiled.

```text
held      a -> S   b -> S   c -> S   f -> T            S: a b c; T: f, with parent b
children  b -> f                                       first blocks of spans by their parent
tails     {}                                           {b} once b is removed, and children b -> c f
```
"""

from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from typing import Any, Final, NamedTuple

from mypy_extensions import i32, i64

from kv_pool.events.spans import (
    MAX_SPAN_BLOCKS,
    BlockSpan,
    SpanCopy,
    can_grow,
    find_position,
    find_ranges,
    grow,
    pack_tokens,
    slice_span,
    trim,
)
from kv_pool.ids import ExternalBlockHash, GroupId

ABSENT: Final[Any] = object()
"""The value of a hash that was not held, in the answer of `HeldHashes.remove`."""

NUM_SHARDS: Final = 256
"""Number of pieces in which the spans of a place are copied."""


class HeldHashes:
    """The hashes at one place, each with a value and a number of copies.

    It is the one index of a stream: a `StreamState` keeps one for each group and medium of its pool, and a
    `PrefixMirror` one for each group and medium of each publisher.

    `values` is one dict, for bulk calls: with a million blocks, growing it blocks other threads for some
    milliseconds, as growing the pool's own map does.

    Attributes:
        values: hash -> its value.
        copies: hash -> number of blocks beyond the first that carry it, if any.
    """

    __slots__ = ("copies", "values")

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}
        self.copies: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[tuple[ExternalBlockHash, int]]:
        """Yield each hash and the number of blocks that carry it."""
        for block_hash in self.values:
            yield block_hash, 1 + self.copies.get(block_hash, 0)

    def store(self, hashes: Any, values: Iterable[Any], counts_copies: bool = True) -> list[int] | None:
        """Add one copy of each hash. O(hashes).

        Args:
            hashes: a sequence; a hash may occur several times.
            values: at least one per hash, for those that had no copy before.
            counts_copies: whether a hash that is held gets another copy.
        Returns:
            The positions of hashes that had no copy before; None if this is all of them.
        """
        held = self.values
        num_before = len(held)
        if len(hashes) == 1:
            held.setdefault(hashes[0], next(iter(values)))
        else:
            list(map(held.setdefault, hashes, values))  # one lookup per hash: with many, each is a cache miss
        num_new = len(held) - num_before
        if num_new == len(hashes):
            return None
        new: set[Any] = set(islice(reversed(held), num_new))
        positions: list[int] = []
        position = -1
        for block_hash in hashes:
            position += 1
            if block_hash in new:
                new.remove(block_hash)
                positions.append(position)
            elif counts_copies:
                self.copies[block_hash] = self.copies.get(block_hash, 0) + 1
        return positions

    def remove(self, hashes: Any) -> tuple[list[Any], list[Any]]:
        """Remove one copy of each hash; a hash may occur several times. O(hashes).

        Returns:
            The hashes that are not held afterwards, and for each its value, or `ABSENT` if it was not held.
        """
        copies = self.copies
        gone = hashes
        if copies and not copies.keys().isdisjoint(hashes):
            gone = []
            for block_hash in hashes:
                num_copies = copies.get(block_hash, 0)
                if num_copies == 0:
                    gone.append(block_hash)
                elif num_copies == 1:
                    del copies[block_hash]
                else:
                    copies[block_hash] = num_copies - 1
        if len(gone) == 1:
            return gone, [self.values.pop(gone[0], ABSENT)]
        return gone, list(map(self.values.pop, gone, repeat(ABSENT)))


class Place(NamedTuple):
    """A location of blocks. The same hash in two places counts as two blocks."""

    medium: str | None
    group_idx: GroupId | None
    locality: str | None
    ownership: str | None


StoreResult = tuple[list[int] | None, bytes | None, bool]
"""The result of `PlaceBlocks.store`, a tuple of three:

- The positions of hashes that had no copy before; None if this is all of them.
- The token ids of all blocks as a msgpack array, if the call packed them.
- Whether one of the blocks is the parent of a block that was already resident.
"""


class PlaceBlocks:
    """The blocks of one place.

    Attributes:
        place: the location of the blocks.
        held: the resident hashes; the value of each is the span that contains it.
        children: hash -> the first hash of the span that follows it; a dict with such hashes as keys if there
            are several. Of the children within the same span only those of removed blocks are included.
        tails: the hashes in `children` that are not resident.
        shards: all spans by serial, in `NUM_SHARDS` dicts, to be copied in pieces.
        copy: the copy that is being taken; None otherwise. Each span is copied before it changes.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.held = HeldHashes()
        self.children: dict[Any, Any] = {}
        self.tails: set[Any] = set()
        self.shards: list[dict[int, BlockSpan]] = [{} for _ in range(NUM_SHARDS)]
        self.copy: SpanCopy | None = None
        self._num_copies: i32 = 0
        self._next_serial: i64 = 0

    # ---- stores ------------------------------------------------------------------------------------

    def store(
        self,
        hashes: list[Any],
        parent: Any,
        kind: Any,
        token_ids: list[Any] | None,
        extra_keys: Any,
        lookahead_token_ids: Any,
    ) -> StoreResult:
        """Add one copy of each hash; `hashes` is not empty. O(hashes).

        Args:
            parent: the hash before the first one, a different one; None at the start of a sequence.
            token_ids: of all blocks; None if they are not kept or unknown.
            extra_keys, lookahead_token_ids: tuples with one entry per block; None if there are none.
        """
        if len(hashes) == 1 and extra_keys is None and lookahead_token_ids is None and parent is not None:
            before = self.held.values.get(parent)
            if before is not None and can_grow(before, parent, kind):
                packed = None if token_ids is None else pack_tokens(token_ids)
                if (packed is None) == (before.tokens is None):
                    return self.store_next(before, hashes, packed)
        span = BlockSpan(tuple(hashes), parent, kind, None, extra_keys, lookahead_token_ids)
        positions = self.held.store(hashes, repeat(span))
        if positions is None and len(hashes) <= MAX_SPAN_BLOCKS:
            if token_ids is not None:
                span.tokens = pack_tokens(token_ids)
            return None, span.tokens, self.add_span(span)
        stored = list(range(len(hashes))) if positions is None else positions
        parts = [
            slice_span(span, first, end, token_ids) for first, end in find_ranges(stored, MAX_SPAN_BLOCKS)
        ]
        for part in parts:
            self.held.values.update(dict.fromkeys(part.hashes, part))
        has_tails = False
        for part in parts:
            has_tails |= self.add_span(part)
        return positions, None, has_tails

    def store_next(self, span: BlockSpan, hashes: list[Any], packed: bytes | None) -> StoreResult:
        """Add one copy of the only hash, which follows the last one of a span."""
        positions = self.held.store(hashes, (span,))
        if positions is not None:
            return positions, packed, False
        if self.copy is not None:
            self.copy.add(span)
        grow(span, hashes[0], packed)
        return None, packed, self.attach_tails(span)

    def attach_tails(self, span: BlockSpan) -> bool:
        """Remove the hashes of a span, all resident now, from `tails`; return True if it had one of them."""
        attached = self.tails.intersection(span.hashes) if self.tails else None
        if not attached:
            return False
        span.has_children = True
        self.tails -= attached
        return True

    def add_span(self, span: BlockSpan) -> bool:
        """Register a span whose hashes are in `held` already, and link it to its parent and children.

        Returns True if some of the children were resident before.
        """
        has_tails = self.attach_tails(span)
        serial = self._next_serial
        self._next_serial = serial + 1
        span.serial = serial
        span.copy_number = self._num_copies
        self.shards[serial % NUM_SHARDS][serial] = span
        parent = span.parent
        if parent is not None:
            self.link(parent, span.hashes[0])
            before = self.held.values.get(parent)
            if before is None:
                self.tails.add(parent)
            else:
                before.has_children = True
        return has_tails

    # ---- removals ----------------------------------------------------------------------------------

    def remove(self, hashes: list[Any]) -> list[Any]:
        """Remove one copy of each hash; return the hashes that are not resident afterwards, each once.

        These include hashes that were not resident before. A hash may occur several times. O(hashes).
        """
        if self.copy is not None:
            for block_hash in hashes:
                found = self.held.values.get(block_hash)
                if found is not None:
                    self.copy.add(found)
        gone, spans = self.held.remove(hashes)
        span: BlockSpan
        has_absent = False
        for found in spans:
            if found is ABSENT:
                has_absent = True
            else:
                span = found
                span.num_resident -= 1
        for index in range(len(spans)):
            if spans[index] is ABSENT:
                continue
            span = spans[index]
            if span.num_resident > 0 or span.has_gaps or span.has_children:
                self.detach(span, gone[index])
            elif span.serial >= 0:  # the common case: all its blocks at once, or its only block
                self.drop_span(span)
                self.unlink(span.parent, span.hashes[0])
        return list(dict.fromkeys(gone)) if has_absent else gone

    def detach(self, span: BlockSpan, block_hash: Any) -> None:
        """Update a span and the links of a block that has left `held`."""
        hashes = span.hashes
        spans = self.held.values
        position: i32 = span.end - 1
        if hashes[position] == block_hash:
            span.end = position
        else:
            position = find_position(span, block_hash)
            span.has_gaps = True
            if spans.get(hashes[position + 1]) is span:
                self.link(block_hash, hashes[position + 1])
                self.tails.add(block_hash)
        if span.has_children and block_hash in self.children:
            self.tails.add(block_hash)
        if position == 0:
            self.unlink(span.parent, block_hash)
        elif span.has_gaps and spans.get(hashes[position - 1]) is not span:
            self.unlink(hashes[position - 1], block_hash)
        if span.num_resident > 0:
            trim(span)
        elif span.serial >= 0:
            self.drop_span(span)

    def drop_span(self, span: BlockSpan) -> None:
        """Forget a span without resident blocks."""
        serial: int = span.serial
        del self.shards[serial % NUM_SHARDS][serial]
        span.serial = -1

    # ---- parents and children ----------------------------------------------------------------------

    def link(self, parent: Any, child: Any) -> None:
        """Record that `child`, the first hash of a span, follows `parent`."""
        children = self.children
        known = children.setdefault(parent, child)
        if known is not child and known != child:
            if type(known) is dict:
                known[child] = None
            else:
                children[parent] = {known: None, child: None}

    def unlink(self, parent: Any, child: Any) -> None:
        """Remove the link from `parent` to `child`, if there is one."""
        known = self.children.get(parent)
        if type(known) is dict:
            known.pop(child, None)
            if known:
                return
        elif known is None or known != child:
            return
        del self.children[parent]
        self.tails.discard(parent)

    # ---- copies ------------------------------------------------------------------------------------

    def begin_copy(self) -> SpanCopy:
        """Begin a copy of the blocks that are resident now; set `copy` to None when it is complete.

        The caller adds the spans in `shards`; those that change first are added by then.
        """
        self._num_copies += 1
        self.copy = SpanCopy(self.held.values, self._num_copies)
        return self.copy
