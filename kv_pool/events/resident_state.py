"""`ResidentState`: the protocol of a publisher's state. `StreamState` implements it."""

from collections.abc import Iterator
from typing import Protocol

from kv_pool.core.kv_events import KVCacheEvent


class ResidentState(Protocol):
    """A state that tracks the resident blocks through the events applied to it."""

    def apply(
        self, events: list[KVCacheEvent], sequence: int | None = None, *, packs_tokens: bool = False
    ) -> list[KVCacheEvent]:
        """Apply the batch with this sequence; return the events to send instead, possibly none.

        Called from the publisher's thread, with increasing sequences. A batch without events only records
        that the sequence is used.
        """

    def iter_snapshot(self) -> tuple[int, Iterator[list[KVCacheEvent]]]:
        """Return the sequence of the last included batch, and events: a clear, then stores, parents first.

        Called, and its lists consumed, by another thread while batches are applied.
        """
