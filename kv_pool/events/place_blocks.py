"""`PlaceBlocks`: the blocks of one place by hash, and their parents and children. Compiled.

```text
spans     a -> S   b -> S   c -> S   f -> T            S: a b c; T: f, with parent b
copies    b -> 1                                       a second block carries b
children  b -> f                                       first blocks of spans by their parent
tails     {}                                           {b} once b is removed; c then starts a span
```
"""

from collections.abc import Iterator
from itertools import repeat
from typing import Any, Final, NamedTuple

from mypy_extensions import i32, i64

from kv_pool.events.block_spans import (
    MAX_SPAN_BLOCKS,
    BlockSpan,
    ResidentBlock,
    can_grow,
    copy_span,
    find_parent,
    find_position,
    grow,
    pack_tokens,
    trim,
)
from kv_pool.ids import ExternalBlockHash, GroupId

NUM_SHARDS: Final = 256
"""Number of pieces in which the spans of a place are copied."""


class Place(NamedTuple):
    """A location of blocks. The same hash in two places counts as two blocks."""

    medium: str | None
    group_idx: GroupId | None
    locality: str | None
    ownership: str | None


class Change(NamedTuple):
    """A span that was added, or a list of hashes that are no longer resident."""

    place: Place
    added: BlockSpan | None
    removed: list[Any] | None


class PlaceBlocks:
    """The blocks of one place.

    `spans` is one dict, for bulk calls: with a million blocks, growing it blocks other threads for some
    milliseconds, as growing the pool's own map does. `shards` has the same spans, to be copied in pieces.

    Attributes:
        place: the location of the blocks.
        spans: hash -> the span that contains it.
        copies: hash -> number of blocks beyond the first that carry it, if any.
        children: hash -> the first hash of the span that follows it; a dict with such hashes as keys if there
            are several. Children within the same span are not included.
        tails: the hashes in `children` that are not resident.
        shards: all spans by serial, in `NUM_SHARDS` dicts.
        packed: the token ids of the last `store` as a msgpack array, if it packed them.
        has_unknown: whether the last `remove` had hashes that were not resident.
        has_tails: whether the last `store` added the parent of blocks that were already resident.
        changes: None, or a list to which all changes are appended, oldest first.
    """

    __slots__ = (
        "_next_serial",
        "changes",
        "children",
        "copies",
        "has_tails",
        "has_unknown",
        "packed",
        "place",
        "shards",
        "spans",
        "tails",
    )

    def __init__(self, place: Place) -> None:
        self.place = place
        self.spans: dict[Any, BlockSpan] = {}
        self.copies: dict[Any, int] = {}
        self.children: dict[Any, Any] = {}
        self.tails: set[Any] = set()
        self.shards: list[dict[int, BlockSpan]] = [{} for _ in range(NUM_SHARDS)]
        self.packed: bytes | None = None
        self.has_tails = False
        self.has_unknown = False
        self.changes: list[Any] | None = None
        self._next_serial: i64 = 0

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[tuple[ExternalBlockHash, int]]:
        """Yield each hash and the number of blocks that carry it."""
        for block_hash in self.spans:
            yield block_hash, 1 + self.copies.get(block_hash, 0)

    def take_serial(self) -> i64:
        serial = self._next_serial
        self._next_serial = serial + 1
        return serial

    def find_block(self, block_hash: Any) -> ResidentBlock:
        """Return a resident block, valid until the next change. Raises KeyError."""
        span = self.spans[block_hash]
        return ResidentBlock(span, find_position(span, block_hash))

    def list_children(self, block: ResidentBlock) -> list[Any]:
        """Return the hashes of the resident children of a block returned by `find_block`."""
        span = block.span
        children = list_children(self.children.get(span.hashes[block.position]))
        if block.position + 1 < span.end:
            children.append(span.hashes[block.position + 1])
        return children

    # ---- stores ------------------------------------------------------------------------------------

    def store(
        self,
        hashes: list[Any],
        parent: Any,
        kind: Any,
        token_ids: list[Any] | None,
        extra_keys: Any,
        lookahead_token_ids: Any,
    ) -> list[int] | None:
        """Add one copy of each hash; `hashes` is not empty. O(hashes).

        Args:
            parent: the hash before the first one; None at the start of a sequence.
            token_ids: of all blocks; None if they are not kept or unknown.
            extra_keys, lookahead_token_ids: tuples with one entry per block; None if there are none.
        Returns:
            The positions of hashes that had no copy before; None if this is all of them.
        """
        spans = self.spans
        num_blocks = len(hashes)
        num_before = len(spans)
        first: Any = hashes[0]
        self.packed = None
        self.has_tails = False
        if num_blocks == 1 and extra_keys is None and lookahead_token_ids is None and parent is not None:
            before = spans.get(parent)
            if before is not None and can_grow(before, parent, kind):
                packed = None if token_ids is None else pack_tokens(token_ids)
                if (packed is None) == (before.tokens is None):
                    return self.store_next(before, first, packed)
        span = BlockSpan(
            tuple(hashes),
            None if parent == first else parent,
            kind,
            None,
            extra_keys,
            lookahead_token_ids,
            self.take_serial(),
        )
        found: list[Any] = list(map(spans.setdefault, hashes, repeat(span)))
        if (
            len(spans) == num_before + num_blocks
            and found.count(span) == num_blocks
            and num_blocks <= MAX_SPAN_BLOCKS
        ):
            if token_ids is not None:
                span.tokens = self.packed = pack_tokens(token_ids)
            if self.tails:
                self.has_tails = self.attach_tails(hashes)
            self.add_span(span)
            return None
        return self.store_parts(span, found, token_ids)

    def store_next(self, span: BlockSpan, block_hash: Any, packed: bytes | None) -> list[int] | None:
        """Add one copy of a hash that follows the last one of a span. Returns as `store`."""
        spans = self.spans
        num_before = len(spans)
        spans.setdefault(block_hash, span)
        if len(spans) == num_before:
            self.copies[block_hash] = self.copies.get(block_hash, 0) + 1
            return []
        grow(span, block_hash, packed)
        self.packed = packed
        if self.tails:
            self.has_tails = self.attach_tails([block_hash])
        if self.changes is not None:
            added = copy_span(span, span.serial)
            added.start = added.end - 1
            self.changes.append(Change(self.place, added, None))
        return None

    def store_parts(self, whole: BlockSpan, found: list[Any], token_ids: list[Any] | None) -> list[int]:
        """Replace a span by one span per run of new blocks; count the copies of the other blocks.

        Args:
            found: the span that already had each hash; `whole` for new hashes.
        Returns:
            The positions of hashes that had no copy before.
        """
        hashes = whole.hashes
        first_copies: list[int] = []
        fresh: set[Any] = set()
        parts: list[BlockSpan] = []
        first: int = 0
        num_blocks: int = len(hashes)
        for position in range(num_blocks + 1):
            is_fresh = False
            if position < num_blocks:
                block_hash = hashes[position]
                is_fresh = found[position] is whole and block_hash not in fresh
                if is_fresh:
                    first_copies.append(position)
                    fresh.add(block_hash)
                else:
                    self.copies[block_hash] = self.copies.get(block_hash, 0) + 1
            if first < position and (not is_fresh or position - first == MAX_SPAN_BLOCKS):
                parts.append(self.slice_span(whole, first, position, token_ids))
                first = position
            if not is_fresh:
                first = position + 1
        for part in parts:
            for block_hash in part.hashes:
                self.spans[block_hash] = part
        if self.tails:
            self.has_tails = self.attach_tails(fresh)
        for part in parts:
            self.add_span(part)
        return first_copies

    def slice_span(self, whole: BlockSpan, first: int, end: int, token_ids: list[Any] | None) -> BlockSpan:
        """Return blocks `[first, end)` of a span as a new span."""
        tokens: Any = None
        if token_ids is not None:
            size: int = whole.kind.block_size
            tokens = pack_tokens(token_ids[first * size : end * size])
        return BlockSpan(
            whole.hashes[first:end],
            whole.hashes[first - 1] if first else whole.parent,
            whole.kind,
            tokens,
            whole.extra_keys and whole.extra_keys[first:end],
            whole.lookahead_token_ids and whole.lookahead_token_ids[first:end],
            self.take_serial(),
        )

    def add_span(self, span: BlockSpan) -> None:
        """Register a span whose hashes are in `spans` already, and link it to its parent."""
        serial: int = span.serial
        self.shards[serial % NUM_SHARDS][serial] = span
        parent = span.parent
        if parent is not None:
            self.link(parent, span.hashes[0])
            before = self.spans.get(parent)
            if before is None:
                self.tails.add(parent)
            else:
                before.has_children = True
        self.note_added(span)

    def attach_tails(self, hashes: Any) -> bool:
        """Remove newly resident hashes from `tails`; return True if there were any."""
        found = self.tails.intersection(hashes)
        for block_hash in found:
            self.tails.remove(block_hash)
            self.spans[block_hash].has_children = True
        return bool(found)

    def note_added(self, span: BlockSpan) -> None:
        if self.changes is not None:
            self.changes.append(Change(self.place, copy_span(span, span.serial), None))

    # ---- removals ----------------------------------------------------------------------------------

    def remove(self, hashes: list[Any]) -> list[Any]:
        """Remove one copy of each hash; return the hashes that are not resident afterwards.

        These include hashes that were not resident before. A hash may occur several times. O(hashes).
        """
        self.has_unknown = False
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
            if not gone:
                return gone
        num_gone = len(gone)
        span: BlockSpan
        if num_gone == 1:
            only: Any = self.spans.pop(gone[0], None)
            if only is None:
                self.has_unknown = True
                return gone
            span = only
            if span.hashes[span.end - 1] == gone[0]:
                self.cut(span, 1)
                return gone
            found: list[Any] = [only]
        else:
            found = list(map(self.spans.pop, gone, repeat(None)))
        first = found[0]
        if first is not None and num_gone > 1 and found.count(first) == num_gone:
            span = first
            end: int = span.end
            last = list(span.hashes[end - num_gone : end])
            last.reverse()
            if last == gone:  # a pool evicts a sequence from its end
                self.cut(span, num_gone)
                return gone
        inner: list[Any] = []
        for index in range(num_gone):
            one = found[index]
            if one is None:
                self.has_unknown = True
                continue
            span = one
            block_hash = gone[index]
            if span.hashes[span.end - 1] == block_hash:
                self.cut(span, 1)
            elif span.hashes[span.start] == block_hash:
                self.cut_first(span)
            else:
                inner.append(block_hash)
                inner.append(span)
        if inner:
            self.remove_inner(inner)
        return gone

    def cut(self, span: BlockSpan, num_blocks: i32) -> None:
        """Drop blocks from the end of a span. They are no longer in `spans`."""
        old_end = span.end
        end = old_end - num_blocks
        if span.has_children:
            for position in range(end, old_end):
                if span.hashes[position] in self.children:
                    self.tails.add(span.hashes[position])
        if end == span.start:
            self.drop_span(span)
            span.end = end
        else:
            span.end = end
            trim(span)

    def cut_first(self, span: BlockSpan) -> None:
        """Drop the first of several blocks of a span. It is no longer in `spans`."""
        position = span.start
        block_hash = span.hashes[position]
        self.unlink(find_parent(span, position), block_hash)
        span.start = position + 1
        self.link(block_hash, span.hashes[position + 1])
        self.tails.add(block_hash)
        trim(span)

    def remove_inner(self, inner: list[Any]) -> None:
        """Remove inner blocks of spans, given as [hash, its span, hash, its span ...]."""
        # First make all of them resident again: the remainder of a span that is split must be resident.
        for index in range(0, len(inner), 2):
            self.spans[inner[index]] = inner[index + 1]
        for index in range(0, len(inner), 2):
            block_hash = inner[index]
            span = self.spans.pop(block_hash)
            if span.hashes[span.end - 1] == block_hash:
                self.cut(span, 1)
            elif span.hashes[span.start] == block_hash:
                self.cut_first(span)
            else:
                self.split(span, find_position(span, block_hash))

    def split(self, span: BlockSpan, position: i32) -> None:
        """Split a span in two, without the block at this position. O(blocks of the shorter part)."""
        hashes = span.hashes
        other = copy_span(span, self.take_serial())
        if position - span.start < span.end - position:
            other.end = position
            span.start = position + 1
        else:
            other.start = position + 1
            span.end = position
        for index in range(other.start, other.end):
            self.spans[hashes[index]] = other
        serial: int = other.serial
        self.shards[serial % NUM_SHARDS][serial] = other
        self.link(hashes[position], hashes[position + 1])
        self.tails.add(hashes[position])
        self.note_added(other)
        trim(span)
        trim(other)

    def drop_span(self, span: BlockSpan) -> None:
        """Remove a span that has lost all its blocks. Called before `end` is updated."""
        serial: int = span.serial
        del self.shards[serial % NUM_SHARDS][serial]
        parent = find_parent(span, span.start)
        if parent is not None:
            self.unlink(parent, span.hashes[span.start])

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
        """Remove the link from `parent`, which may be None, to `child`."""
        if parent is None:
            return
        known = self.children[parent]
        if type(known) is dict:
            del known[child]
            if known:
                return
        del self.children[parent]
        self.tails.discard(parent)


def list_children(children: Any) -> list[Any]:
    """Return the hashes in a value of `PlaceBlocks.children`; [] for None."""
    if children is None:
        return []
    return list(children) if type(children) is dict else [children]
