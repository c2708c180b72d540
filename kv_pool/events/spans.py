"""`BlockSpan`: the blocks that one event announced, and copies of them for a snapshot. Compiled.

Most events announce many blocks. One span for all of them costs less time and memory than one object per
block.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from msgspec import MsgspecError
from msgspec.msgpack import Decoder, Encoder
from mypy_extensions import i32, i64, mypyc_attr

MAX_SPAN_BLOCKS: Final = 512
"""Longer events are split into several spans, so that unpacking the tokens of one span stays fast."""

MAX_GROWN_BLOCKS: Final = 16
"""A block that follows a shorter span is appended to it: a sequence grows by one block at a time."""

MIN_TRIMMED_BLOCKS: Final = 32
"""Shorter spans are not trimmed: they keep the fields of removed blocks."""

LEAST_INDEXED_BLOCKS: Final = 32
"""Spans of at least this length get an index of positions when an inner block is removed."""

_encode: Final[Any] = Encoder().encode
_decode: Final[Any] = Decoder().decode


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
        copy_number: number of the last copy of its place that it is in, or is too new for.
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


# ---- copies ------------------------------------------------------------------------------------------


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


class SpanCopy:
    """A copy of the resident blocks of a place, taken span by span while other spans change.

    Attributes:
        runs: the blocks copied so far, in no order.
    """

    def __init__(self, spans: dict[Any, Any], number: i32) -> None:
        """`spans` is the span of each resident hash; `number` that of the copy, above all earlier ones."""
        self.runs: list[BlockRun] = []
        self._spans = spans
        self._number: i32 = number

    def add(self, span: BlockSpan) -> None:
        """Copy the resident blocks of a span, unless they are copied, or newer than the copy."""
        if span.copy_number == self._number:
            return
        span.copy_number = self._number
        same = BlockSpan(
            span.hashes, span.parent, span.kind, span.tokens, span.extra_keys, span.lookahead_token_ids
        )
        if not span.has_gaps:
            self.runs.append(BlockRun(same, 0, span.end))
            return
        spans = self._spans
        positions = [one for one in range(span.end) if spans.get(span.hashes[one]) is span]
        for first, end in find_ranges(positions, MAX_SPAN_BLOCKS):
            self.runs.append(BlockRun(same, first, end))
