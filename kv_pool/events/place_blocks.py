"""`HeldHashes`: the hashes at one place. `PlaceBlocks`: with their parents, children and fields. Compiled.

Most events announce many blocks. One `BlockSpan` for all of them costs less time and memory than one object
per block.

```text
held      a -> S   b -> S   c -> S   f -> T            S: a b c; T: f, with parent b
children  b -> f                                       first blocks of spans by their parent
tails     {}                                           {b} once b is removed, and children b -> c f
```
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any, Final, NamedTuple

from msgspec import MsgspecError
from msgspec.msgpack import Decoder, Encoder
from mypy_extensions import i32, i64, mypyc_attr

from kv_pool.ids import ExternalBlockHash, GroupId

ABSENT: Final[Any] = object()
"""The value of a hash that was not held, in the answer of `HeldHashes.remove`."""

MAX_SPAN_BLOCKS: Final = 512
"""Longer events are split into several spans, so that unpacking the tokens of one span stays fast."""

MAX_GROWN_BLOCKS: Final = 16
"""A block that follows a shorter span is appended to it: a sequence grows by one block at a time."""

MIN_TRIMMED_BLOCKS: Final = 32
"""Shorter spans are not trimmed: they keep the fields of removed blocks."""

LEAST_INDEXED_BLOCKS: Final = 32
"""Spans of at least this length get an index of positions when an inner block is removed."""

NUM_SHARDS: Final = 256
"""Number of pieces in which the spans of a place are copied."""

_encode: Final[Any] = Encoder().encode
_decode: Final[Any] = Decoder().decode


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


class BlockKind(NamedTuple):
    """The properties that most blocks share; equal kinds are one object."""

    block_size: int
    lora_id: int | None
    lora_name: str | None
    kv_cache_spec_kind: str | None
    kv_cache_spec_sliding_window: int | None
    has_extra_keys: bool


# Compiled without a GC header, as a pool's blocks are: a collection does not visit a million spans.
@mypyc_attr(acyclic=True)
class BlockSpan:
    """The blocks of one event, each the parent of the next; some of them may have been removed since.

    Attributes:
        hashes: of all blocks that the event announced together, including removed ones.
        parent: the hash before `hashes[0]` in the sequence, resident or not; None at the start.
        kind: a `BlockKind`.
        tokens: the token ids of all `hashes`, packed by `pack_tokens`; None if not kept or unknown.
        extra_keys, lookahead_token_ids: the event's entries for all `hashes`; None if there are none.
        num_resident: number of blocks that are still resident.
        end: no block at this position or behind it is resident.
        serial: unique among the spans of a `PlaceBlocks`; -1 before and after it is one of them.
        copy_number: number of the last copy of its `PlaceBlocks` that it is in, or is too new for.
        has_children: whether one of the hashes may be the parent of another span.
        has_gaps: whether a block may have been removed before one that is still resident.
        positions: hash -> index in `hashes`, built when an inner block is first removed; None before.
    """

    def __init__(
        self,
        hashes: tuple[Any, ...],
        parent: Any,
        kind: Any,
        tokens: Any,
        extra_keys: Any,
        lookahead_token_ids: Any,
    ) -> None:
        self.hashes = hashes
        self.parent = parent
        self.kind = kind
        self.tokens = tokens
        self.extra_keys = extra_keys
        self.lookahead_token_ids = lookahead_token_ids
        self.num_resident: i32 = len(hashes)
        self.end: i32 = len(hashes)
        self.serial: i64 = -1
        self.copy_number: i32 = 0
        self.has_children = False
        self.has_gaps = False
        self.positions: Any = None


@mypyc_attr(acyclic=True)
class BlockRun:
    """Consecutive resident blocks `[first, end)` of a span.

    Attributes:
        parent: the hash before the first block in its sequence, resident or not; None at the start.
    """

    def __init__(self, span: BlockSpan, first: i32, end: i32) -> None:
        self.span = span
        self.first: i32 = first
        self.end: i32 = end
        self.parent: Any = span.hashes[first - 1] if first else span.parent

    def __len__(self) -> int:
        return self.end - self.first


def slice_span(whole: BlockSpan, first: int, end: int, token_ids: list[Any] | None) -> BlockSpan:
    """Return blocks `[first, end)` of a span as a new span; `token_ids` are those of the whole span."""
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
    )


def trim(span: BlockSpan) -> None:
    """Drop the fields of removed blocks at the end of a long span if they are at least three quarters."""
    num_held: i32 = len(span.hashes)
    if num_held < MIN_TRIMMED_BLOCKS or span.end * 4 > num_held:
        return
    tokens = span.tokens
    first = slice_span(span, 0, span.end, None if tokens is None else unpack_tokens(tokens))
    span.hashes = first.hashes
    span.tokens = first.tokens
    span.extra_keys = first.extra_keys
    span.lookahead_token_ids = first.lookahead_token_ids
    span.positions = None


def can_grow(span: BlockSpan, last: Any, kind: Any) -> bool:
    """Return True if a block of this kind whose parent is `last` can be appended to the span."""
    num_held: i32 = len(span.hashes)
    return (
        span.end == num_held < MAX_GROWN_BLOCKS
        and not span.has_gaps
        and span.kind is kind
        and span.extra_keys is None
        and span.lookahead_token_ids is None
        and span.hashes[num_held - 1] == last
    )


def grow(span: BlockSpan, block_hash: Any, tokens: Any) -> None:
    """Append a block. O(blocks of the span)."""
    if tokens is not None:
        size: int = span.kind.block_size
        span.tokens = join_tokens(span.tokens, len(span.hashes) * size, tokens, size)
    span.hashes = (*span.hashes, block_hash)
    span.num_resident += 1
    span.end += 1
    span.positions = None


def pack_tokens(token_ids: Sequence[int]) -> bytes | None:
    """Return token ids as a msgpack array; None if one of them cannot be encoded."""
    try:
        packed: bytes = _encode(token_ids)
    except (TypeError, OverflowError, MsgspecError):
        return None
    return packed


def unpack_tokens(packed: bytes) -> list[int]:
    """Return the token ids that `pack_tokens` packed."""
    token_ids: list[int] = _decode(packed)
    return token_ids


def join_tokens(packed: bytes, num_tokens: int, following: bytes, num_following: int) -> bytes:
    """Join two results of `pack_tokens`, which have `num_tokens` and `num_following` tokens."""
    header = b"\xdd" + (num_tokens + num_following).to_bytes(4, "big")
    return header + packed[measure_header(packed) :] + following[measure_header(following) :]


def measure_header(packed: bytes) -> int:
    """Return the size of a msgpack array's header, in bytes."""
    return {0xDC: 3, 0xDD: 5}.get(packed[0], 1)


def find_position(span: BlockSpan, block_hash: Any) -> i32:
    """Return the index of a hash in the span's hashes."""
    if span.end < LEAST_INDEXED_BLOCKS:
        return span.hashes.index(block_hash)
    if span.positions is None:
        span.positions = {one: position for position, one in enumerate(span.hashes)}
    position: int = span.positions[block_hash]
    return position


def find_ranges(positions: list[int], max_length: int) -> list[tuple[int, int]]:
    """Return the runs `[first, end)` of consecutive positions, which ascend, of at most this length."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position < ranges[-1][0] + max_length:
            ranges[-1] = ranges[-1][0], position + 1
        else:
            ranges.append((position, position + 1))
    return ranges


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
        copied: while a copy is taken, all that it has; None otherwise.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.held = HeldHashes()
        self.children: dict[Any, Any] = {}
        self.tails: set[Any] = set()
        self.shards: list[dict[int, BlockSpan]] = [{} for _ in range(NUM_SHARDS)]
        self.packed: bytes | None = None
        self.has_tails = False
        self.copied: list[BlockRun] | None = None
        self._copy_number: i32 = 0
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
            self.copy_span(span)
            grow(span, hashes[0], packed)
            self.attach_tails(span)
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
        span.copy_number = self._copy_number
        self.shards[serial % NUM_SHARDS][serial] = span
        parent = span.parent
        if parent is not None:
            self.link(parent, span.hashes[0])
            before = self.held.values.get(parent)
            if before is None:
                self.tails.add(parent)
            else:
                before.has_children = True

    # ---- removals ----------------------------------------------------------------------------------

    def remove(self, hashes: list[Any]) -> list[Any]:
        """Remove one copy of each hash; return the hashes that are not resident afterwards, each once.

        These include hashes that were not resident before. A hash may occur several times. O(hashes).
        """
        if self.copied is not None:
            self.copy_spans([found for found in map(self.held.values.get, hashes) if found is not None])
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

    def begin_copy(self) -> None:
        """Begin a copy of the blocks that are resident now.

        From now on each span is copied before it changes; the caller copies all others, shard by shard.
        """
        self._copy_number += 1
        self.copied = []

    def copy_spans(self, spans: Iterable[BlockSpan]) -> None:
        """Copy those of these spans that are not copied yet."""
        for span in spans:
            self.copy_span(span)

    def copy_span(self, span: BlockSpan) -> None:
        """Copy the resident blocks of a span, unless no copy is taken, it has them, or they are new."""
        copied = self.copied
        if copied is None or span.copy_number == self._copy_number:
            return
        span.copy_number = self._copy_number
        same = BlockSpan(
            span.hashes, span.parent, span.kind, span.tokens, span.extra_keys, span.lookahead_token_ids
        )
        if not span.has_gaps:
            copied.append(BlockRun(same, 0, span.end))
            return
        spans = self.held.values
        positions = [one for one in range(span.end) if spans.get(span.hashes[one]) is span]
        for first, end in find_ranges(positions, MAX_SPAN_BLOCKS):
            copied.append(BlockRun(same, first, end))

    def end_copy(self) -> list[BlockRun]:
        """Return what was copied: all blocks that were resident at `begin_copy`, in no order."""
        copied: list[BlockRun] = self.copied or []
        self.copied = None
        return copied
