"""`KVEventBatch` and its encoding: one msgpack array `[ts, events, rank]`, byte for byte as in vLLM 0.33.

The encoder is strict and the decoder is lenient: deployed publishers send events as maps or, before June
2026, as arrays, and a reader that stops at the first unknown event loses the stream. A snapshot is one batch,
encoded piece by piece.

```text
live     topic | sequence | payload
request  identity | empty | first sequence requested            as received by a ROUTER
reply    identity | empty | topic | sequence | payload          for each batch
end      identity | empty | empty | ff ff ff ff ff ff ff ff | empty
```
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kv_pool.errors import EventStreamError, InvalidArgumentError, InvalidTypeError

END_OF_REPLAY = b"\xff" * 8
"""Replaces the sequence in the message that ends a replay."""

MAX_SEQUENCE = 2**64 - 2
"""The highest sequence of a batch; the next number is the end marker."""

SEQUENCE_BYTES = 8


def pack_sequence(sequence: int) -> bytes:
    """Return a sequence as 8 bytes, big-endian. Raises InvalidArgumentError outside 0 to `MAX_SEQUENCE`."""
    if not 0 <= sequence <= MAX_SEQUENCE:
        raise InvalidArgumentError(f"sequence is {sequence}; it must be 0 to {MAX_SEQUENCE}")
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def unpack_sequence(frame: bytes) -> int:
    """Return the number in a sequence frame; 2**64 - 1 is the end marker.

    Raises:
        EventStreamError: the frame is not 8 bytes long.
    """
    if len(frame) != SEQUENCE_BYTES:
        raise EventStreamError(f"a sequence frame has {len(frame)} bytes; it must have {SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big")


class KVEventBatch(msgspec.Struct, array_like=True):
    """The prefix cache changes of one scheduler step.

    Attributes:
        ts: wall-clock time at which the batch was built, in seconds since the epoch.
        events: in order of occurrence; an empty list is a heartbeat.
        data_parallel_rank: always an int on the wire, since some readers reject nil.
    """

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


@dataclass(slots=True, eq=False, repr=False)
class DecodedBatch:
    """A decoded batch.

    Attributes:
        ts, data_parallel_rank: as in `KVEventBatch`.
        unread_events: the events, whose `token_ids` may still be a `msgspec.Raw`. For readers that ignore
            tokens or read them from bytes. The first access to `events` replaces this list.
        num_dropped: events that could not be decoded: malformed, or of an unknown type.
        first_drop_reason: why the first of them was dropped; None if none was.
        has_raw_tokens: whether `unread_events` may have tokens that are not decoded.
    """

    ts: float
    unread_events: list[KVCacheEvent]
    data_parallel_rank: int | None
    num_dropped: int = 0
    first_drop_reason: str | None = None
    has_raw_tokens: bool = False

    @property
    def events(self) -> list[KVCacheEvent]:
        """The events that could be decoded, in order. Token ids are decoded on first access."""
        if self.has_raw_tokens:
            self._read_tokens()
        return self.unread_events

    def _read_tokens(self) -> None:
        events: list[KVCacheEvent] = []
        for event in self.unread_events:
            if isinstance(event, _UnreadStored):
                try:
                    event.token_ids = _read_token_ids(event.token_ids)  # type: ignore[assignment]
                except _UNREADABLE as error:
                    self.num_dropped += 1
                    self.first_drop_reason = self.first_drop_reason or f"{error} - at `$.token_ids`"
                    continue
                event.__class__ = BlockStored  # type: ignore[assignment]
            events.append(event)
        self.unread_events = events
        self.has_raw_tokens = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DecodedBatch):
            return NotImplemented
        return self._key() == other._key()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"DecodedBatch(ts={self.ts}, events={self.events}, data_parallel_rank={self.data_parallel_rank}, "
            f"num_dropped={self.num_dropped}, first_drop_reason={self.first_drop_reason!r})"
        )

    def _key(self) -> tuple[Any, ...]:
        return self.ts, self.events, self.data_parallel_rank, self.num_dropped, self.first_drop_reason


def encode_batch(batch: KVEventBatch, positional: bool = False) -> bytes:
    """Encode a batch as vLLM 0.33 does: events are maps keyed by field name.

    Args:
        positional: encode events as vLLM did before June 2026, for readers that know only this form: as
            arrays, class name first. Later fields are omitted (locality, ownership, session, lookahead), and
            so are trailing fields that are None.
    Raises:
        InvalidTypeError: an event type that has no array form.
        TypeError, ValueError, OverflowError: from msgspec, for values that msgpack cannot represent.
    """
    if positional:
        events = [_list_positional(event) for event in batch.events]
        return _ENCODER.encode([batch.ts, events, batch.data_parallel_rank])
    return _ENCODER.encode(batch)


def decode_batch(payload: bytes) -> DecodedBatch:
    """Decode a batch from any known publisher. Invalid events are dropped one by one.

    Accepted: two or more elements, with the rank omitted or nil; an integer `ts`; hashes as integers (signed
    or unsigned) or bytes, but not as text; maps in any key order and with unknown keys; `lora_id`,
    `lora_name` and `medium` omitted; arrays with the class name first and unknown elements at the end.
    Tokens in groups, such as the pairs that SGLang sends with EAGLE, and nil are read as no tokens: these
    blocks are identified by their hashes.

    Raises:
        EventStreamError: the payload is not a batch.
    Cost: one pass in C if every event is a well-formed map; otherwise, and for batches as large as a
        snapshot, a Python loop over the events, which lets other threads run in between.
    """
    batch = decode_lazily(payload)
    batch.events  # noqa: B018 - decodes the tokens, and drops stores with invalid tokens
    return batch


def decode_lazily(payload: bytes) -> DecodedBatch:
    """Decode a batch as `decode_batch` does, but its token ids only on the first access to `events`.

    Tokens are most of a store's bytes, and a mirror of hashes does not need them.

    Raises:
        EventStreamError: the payload is not a batch.
    """
    try:
        if len(payload) >= _LARGE_BYTES:
            envelope = _ENVELOPE_DECODER.decode(payload)
            raw_events = _LIST_DECODER.decode(envelope.events)
            events: list[KVCacheEvent] = [_EVENT_DECODER.decode(raw_event) for raw_event in raw_events]
            return DecodedBatch(envelope.ts, events, envelope.data_parallel_rank, has_raw_tokens=True)
        batch = _DECODER.decode(payload)
    except _UNREADABLE:
        return _decode_loosely(payload)
    return DecodedBatch(batch.ts, list(batch.events), batch.data_parallel_rank, has_raw_tokens=True)


def read_rank(payload: bytes) -> int | None:
    """Return the data-parallel rank of an encoded batch; None if it has none or is no batch."""
    try:
        return _ENVELOPE_DECODER.decode(payload).data_parallel_rank
    except _UNREADABLE:
        return None


class _UnreadStored(BlockStored, tag="BlockStored"):
    """A `BlockStored` whose tokens are not decoded yet."""

    token_ids: msgspec.Raw  # type: ignore[assignment]


_Event = _UnreadStored | BlockRemoved | AllBlocksCleared
_Events = TypeVar("_Events")


class _Batch(msgspec.Struct, Generic[_Events], array_like=True):
    """A batch with its events as a decoder returns them."""

    ts: float
    events: _Events
    data_parallel_rank: int | None = None


_LARGE_BYTES = 100_000
"""From this size on, decoding in one C call blocks other threads for longer than Python's switch interval."""

_HEAD_BYTES = 40

_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
"""Errors that decoding raises for invalid bytes; some errors of msgspec 0.19 are not ValueErrors."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Batch[list[_Event]])
_LOOSE_DECODER = msgspec.msgpack.Decoder(KVEventBatch)
_ENVELOPE_DECODER = msgspec.msgpack.Decoder(_Batch[msgspec.Raw])
_LIST_DECODER = msgspec.msgpack.Decoder(list[msgspec.Raw])
_TOKENS_DECODER = msgspec.msgpack.Decoder(list[int])
_EVENT_DECODER: msgspec.msgpack.Decoder[_Event] = msgspec.msgpack.Decoder(_Event)

_EVENT_TYPES: dict[str, type[KVCacheEvent]] = {
    own.__name__: own for own in (BlockStored, BlockRemoved, AllBlocksCleared)
}

# Stores up to their window. Some vLLM versions appended a kind and a window to removals; stores have both.
_NUM_POSITIONS = {"BlockStored": 11, "BlockRemoved": 3, "AllBlocksCleared": 0}
_POSITIONS = {name: own.__struct_fields__[: _NUM_POSITIONS[name]] for name, own in _EVENT_TYPES.items()}
"""The fields of the array form, in order, after the class name."""

_LATER_FIELDS = ("lora_id", "medium", "lora_name")
"""Fields without a default that some publishers omit."""


def _list_positional(event: Any) -> list[Any]:
    # Identify the event by its msgspec tag, so that classes of other packages work, too.
    name = event.__struct_config__.tag if isinstance(event, msgspec.Struct) else type(event).__name__
    if name not in _POSITIONS:
        raise InvalidTypeError(f"{name} has no array form; it exists for {', '.join(_POSITIONS)}")
    fields = [name, *(getattr(event, field) for field in _POSITIONS[name])]
    while fields[-1] is None:
        fields.pop()
    return fields


def _decode_loosely(payload: bytes) -> DecodedBatch:
    try:
        batch = _LOOSE_DECODER.decode(payload)
    except _UNREADABLE as error:
        raise EventStreamError(f"a payload of {len(payload)} bytes is not an event batch: {error}") from error
    events = []
    reasons = []
    for raw_event in batch.events:
        try:
            events.append(_read_event(raw_event))
        except _UNREADABLE as error:
            reasons.append(str(error))
    first_reason = reasons[0] if reasons else None
    return DecodedBatch(batch.ts, events, batch.data_parallel_rank, len(reasons), first_reason)


def _read_event(raw: Any) -> KVCacheEvent:
    """Return the event in a map or an array. Raises ValueError or TypeError if there is none."""
    fields = raw
    if isinstance(raw, list) and raw:
        name = raw[0]
        fields = dict(zip(_POSITIONS.get(name, ()), raw[1:], strict=False)) if isinstance(name, str) else {}
        fields["type"] = name
    if not isinstance(fields, dict):
        raise EventStreamError(f"an event is {raw!r:.80}, neither a map nor an array")
    name = fields.get("type")
    event_type = _EVENT_TYPES.get(name) if isinstance(name, str) else None
    if event_type is None:
        raise EventStreamError(f"an event has the unknown type {name!r:.80}")
    if event_type is not AllBlocksCleared:
        fields = dict.fromkeys(_LATER_FIELDS) | fields
    if event_type is BlockStored and _has_no_tokens(fields.get("token_ids")):
        fields["token_ids"] = []
    # Without `builtin_types`, text would be decoded as base64 where a hash may be bytes.
    return msgspec.convert(fields, event_type, builtin_types=(bytes,))


def _has_no_tokens(found: Any) -> bool:
    """Return True for token ids that stand for no tokens: nil, or groups of tokens."""
    try:
        msgspec.convert(found, list[list[int]] | None)
    except _UNREADABLE:
        return False
    return True


def _read_token_ids(raw: msgspec.Raw) -> list[int]:
    """Return the tokens of a store; [] if they stand for no tokens. Raises the error of other values."""
    try:
        return _TOKENS_DECODER.decode(raw)
    except _UNREADABLE:
        if _has_no_tokens(msgspec.msgpack.decode(raw)):
            return []
        raise


def encode_in_pieces(
    ts: float, chunks: Iterable[list[KVCacheEvent]], rank: int, positional: bool
) -> tuple[bytes, int]:
    """Encode the events of all chunks as one batch.

    Events are encoded one at a time, because msgspec holds the GIL while it encodes, which blocks the pool's
    thread.

    Args:
        positional: as in `encode_batch`.
    Returns:
        The payload, and the number of events omitted because they cannot be encoded.
    """
    pieces = []
    num_left_out = 0
    for chunk in chunks:
        for event in chunk:
            try:
                pieces.append(_ENCODER.encode(_list_positional(event) if positional else event))
            except Exception:
                num_left_out += 1
    # [ts, [pieces], rank]: the same bytes as from a single call.
    head = b"\x93" + _ENCODER.encode(ts) + _encode_header(len(pieces))
    return b"".join([head, *pieces, _ENCODER.encode(rank)]), num_left_out


def _encode_header(num_elements: int) -> bytes:
    """Return the header of an array with this many elements. O(1): a snapshot may have a million events."""
    if num_elements < 16:
        return bytes([0x90 | num_elements])
    if num_elements < 2**16:
        return b"\xdc" + num_elements.to_bytes(2, "big")
    return b"\xdd" + num_elements.to_bytes(4, "big")


def is_snapshot(payload: bytes) -> bool:
    """Return True if a batch begins with a clear, so that the state after it does not depend on earlier ones.

    Checks only the first bytes, since snapshots can be large: a clear has no fields, so its name directly
    follows the time and the number of events, and no other event is short enough to precede it there.
    """
    return b"AllBlocksCleared" in payload[:_HEAD_BYTES]
