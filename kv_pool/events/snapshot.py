"""Snapshots: everything that is resident, in one batch, for readers too late for a replay."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import msgspec

from kv_pool.core.kv_events import AllBlocksCleared, KVCacheEvent
from kv_pool.events.batch import KVEventBatch

CHUNK_EVENTS = 256
"""Events encoded at once: msgspec holds the interpreter's lock meanwhile, and the pool's thread waits."""


class ResidentState(Protocol):
    """What a publisher asks of its `state`, always on the publisher's own thread; `StreamState` is one."""

    def apply(self, events: list[KVCacheEvent]) -> list[KVCacheEvent]:
        """Take note of what happened; what to send instead, maybe nothing."""

    def list_resident(self, chunk_events: int) -> Iterator[list[KVCacheEvent]]:
        """Stores of every resident block, parents first. Nobody changes these events afterwards."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was resident when the batch of `sequence` had happened, yet to be encoded.

    Attributes:
        waiting: who asked for it, and for which sequence.
        chunks: the stores, parents first; None if the state could not tell.
    """

    sequence: int
    ts: float
    chunks: list[list[KVCacheEvent]] | None
    waiting: list[tuple[bytes, int]]


def encode_snapshot(
    ts: float, chunks: Iterable[list[KVCacheEvent]], rank: int, encode: Callable[[KVEventBatch], bytes]
) -> tuple[bytes, int]:
    """One batch: `AllBlocksCleared`, and then the events of all chunks, encoded one chunk at a time.

    Args:
        encode: `encode_batch` or `encode_batch_positional`.
    Returns:
        The payload, and how many events were left out since they cannot be encoded.
    """
    cleared: list[list[KVCacheEvent]] = [[AllBlocksCleared()]]
    pieces = []
    num_events = num_left_out = 0
    for chunk in chain(cleared, chunks):
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
    # [ts, [pieces], rank], as if it had been encoded in one go.
    head = b"\x93" + msgspec.msgpack.encode(ts) + _make_array_header(num_events)
    return b"".join([head, *pieces, msgspec.msgpack.encode(rank)]), num_left_out


def _encode_events(events: list[KVCacheEvent], encode: Callable[[KVEventBatch], bytes]) -> bytes:
    """The elements of an array of these events, without the array's header."""
    payload = encode(KVEventBatch(0.0, events, 0))
    # |<- 1: array of 3 ->|<- 9: ts ->|<- header ->|<- events ->|<- 1: rank ->|
    return payload[10 + len(_make_array_header(len(events))) : -1]


def _make_array_header(length: int) -> bytes:
    if length < 16:
        return bytes([0x90 | length])
    if length < 2**16:
        return b"\xdc" + length.to_bytes(2, "big")
    return b"\xdd" + length.to_bytes(4, "big")
