"""`PlaceBlocks`: the blocks of one place by hash, and their parents and children. Compiled.

```text
held      a -> S   b -> S   c -> S   f -> T            S: a b c; T: f, with parent b
children  b -> f                                       first blocks of spans by their parent
tails     {}                                           {b} once b is removed, and children b -> c f
```
"""

from itertools import repeat
from typing import Any, Final, NamedTuple

from mypy_extensions import i32, i64

from kv_pool.events.block_spans import (
    MAX_SPAN_BLOCKS,
    BlockSpan,
    ResidentBlock,
    can_grow,
    copy_span,
    find_position,
    find_ranges,
    grow,
    pack_tokens,
    slice_span,
    trim,
)
from kv_pool.events.held_hashes import ABSENT, HeldHashes
from kv_pool.ids import GroupId

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

    Attributes:
        place: the location of the blocks.
        held: the resident hashes; the value of each is the span that contains it.
        children: hash -> the first hash of the span that follows it; a dict with such hashes as keys if there
            are several. Of the children within the same span only those of removed blocks are included.
        tails: the hashes in `children` that are not resident.
        shards: all spans by serial, in `NUM_SHARDS` dicts, to be copied in pieces.
        packed: the token ids of the last `store` as a msgpack array, if it packed them.
        has_tails: whether the last `store` added the parent of blocks that were already resident.
        changes: None, or a list to which all changes are appended, oldest first.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.held = HeldHashes()
        self.children: dict[Any, Any] = {}
        self.tails: set[Any] = set()
        self.shards: list[dict[int, BlockSpan]] = [{} for _ in range(NUM_SHARDS)]
        self.packed: bytes | None = None
        self.has_tails = False
        self.changes: list[Any] | None = None
        self._next_serial: i64 = 0

    def find_block(self, block_hash: Any) -> ResidentBlock:
        """Return a resident block, valid until the next change. Raises KeyError."""
        span: BlockSpan = self.held.values[block_hash]
        return ResidentBlock(span, find_position(span, block_hash))

    def list_children(self, block: ResidentBlock) -> list[Any]:
        """Return the hashes of the resident children of a block returned by `find_block`."""
        span = block.span
        following = block.position + 1
        known = self.children.get(span.hashes[block.position])
        children = [] if known is None else list(known) if type(known) is dict else [known]
        if following < span.end and self.held.values.get(span.hashes[following]) is span:
            children.append(span.hashes[following])
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
        if len(hashes) == 1 and extra_keys is None and lookahead_token_ids is None and parent is not None:
            before = self.held.values.get(parent)
            if before is not None and can_grow(before, parent, kind):
                packed = None if token_ids is None else pack_tokens(token_ids)
                if (packed is None) == (before.tokens is None):
                    return self.store_next(before, hashes, packed)
        parent = None if parent == hashes[0] else parent
        span = BlockSpan(tuple(hashes), parent, kind, None, extra_keys, lookahead_token_ids)
        self.packed = None
        self.has_tails = False
        positions = self.held.store(hashes, repeat(span))
        if positions is None and len(hashes) <= MAX_SPAN_BLOCKS:
            if token_ids is not None:
                span.tokens = self.packed = pack_tokens(token_ids)
            self.add_span(span)
            return None
        stored = list(range(len(hashes))) if positions is None else positions
        parts = [
            slice_span(span, first, end, token_ids) for first, end in find_ranges(stored, MAX_SPAN_BLOCKS)
        ]
        for part in parts:
            self.held.values.update(dict.fromkeys(part.hashes, part))
        for part in parts:
            self.add_span(part)
        return positions

    def store_next(self, span: BlockSpan, hashes: list[Any], packed: bytes | None) -> list[int] | None:
        """Add one copy of the only hash, which follows the last one of a span. Returns as `store`."""
        self.packed = packed
        self.has_tails = False
        positions = self.held.store(hashes, (span,))
        if positions is None:
            parent = span.hashes[span.end - 1]
            grow(span, hashes[0], packed)
            self.attach_tails(span)
            if self.changes is not None:
                added = BlockSpan((hashes[0],), parent, span.kind, packed, None, None)
                self.changes.append(Change(self.place, added, None))
        return positions

    def attach_tails(self, span: BlockSpan) -> None:
        """Remove the hashes of a span, all of which are resident now, from `tails`."""
        if self.tails:
            for block_hash in self.tails.intersection(span.hashes):
                self.tails.remove(block_hash)
                span.has_children = True
                self.has_tails = True

    def add_span(self, span: BlockSpan) -> None:
        """Register a span whose hashes are in `held` already, and link it to its parent and children."""
        self.attach_tails(span)
        serial = self._next_serial
        self._next_serial = serial + 1
        span.serial = serial
        self.shards[serial % NUM_SHARDS][serial] = span
        parent = span.parent
        if parent is not None:
            self.link(parent, span.hashes[0])
            before = self.held.values.get(parent)
            if before is None:
                self.tails.add(parent)
            else:
                before.has_children = True
        if self.changes is not None:
            self.changes.append(Change(self.place, copy_span(span), None))

    # ---- removals ----------------------------------------------------------------------------------

    def remove(self, hashes: list[Any]) -> list[Any]:
        """Remove one copy of each hash; return the hashes that are not resident afterwards.

        These include hashes that were not resident before. A hash may occur several times. O(hashes).
        """
        gone, spans = self.held.remove(hashes)
        span: BlockSpan
        for found in spans:
            if found is not ABSENT:
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
        if self.changes is not None:
            self.changes.append(Change(self.place, None, gone.copy()))
        return gone

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
