"""Encode a snapshot as one batch, piece by piece; recognize a snapshot."""

from collections.abc import Callable, Iterable

import msgspec

from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.events.batch import KVEventBatch

_HEAD_BYTES = 40


def encode_in_pieces(
    ts: float, chunks: Iterable[list[KVCacheEvent]], rank: int, encode: Callable[[KVEventBatch], bytes]
) -> tuple[bytes, int]:
    """Encode the events of all chunks as one batch.

    Chunks are encoded one at a time, because msgspec holds the GIL while it encodes, which blocks the pool's
    thread.

    Args:
        encode: `encode_batch` or `encode_batch_positional`.
    Returns:
        The payload, and the number of events omitted because they cannot be encoded.
    """
    pieces = []
    num_events = num_left_out = 0
    for chunk in chunks:
        try:
            pieces.append(_encode_events(chunk, encode))
            num_events += len(chunk)
        except Exception:
            for event in chunk:
                try:
                    pieces.append(_encode_events([event], encode))
                    num_events += 1
                except Exception:
                    num_left_out += 1
    # [ts, [pieces], rank]: the same bytes as from a single call.
    head = b"\x93" + msgspec.msgpack.encode(ts) + _make_array_header(num_events)
    return b"".join([head, *pieces, msgspec.msgpack.encode(rank)]), num_left_out


def _encode_events(events: list[KVCacheEvent], encode: Callable[[KVEventBatch], bytes]) -> bytes:
    """Return the encoded events without an array header."""
    payload = encode(KVEventBatch(0.0, events, 0))
    # |<- 1: array of 3 ->|<- 9: ts ->|<- header ->|<- events ->|<- 1: rank ->|
    return payload[10 + len(_make_array_header(len(events))) : -1]


def _make_array_header(length: int) -> bytes:
    if length < 16:
        return bytes([0x90 | length])
    if length < 2**16:
        return b"\xdc" + length.to_bytes(2, "big")
    return b"\xdd" + length.to_bytes(4, "big")


def is_snapshot(payload: bytes) -> bool:
    """Return True if a batch begins with a clear, so that the state after it does not depend on earlier ones.

    Checks only the first bytes, since snapshots can be large: a clear has no fields, so its name directly
    follows the time and the number of events, and no other event is short enough to precede it there.
    """
    return b"AllBlocksCleared" in payload[:_HEAD_BYTES]
