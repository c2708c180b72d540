"""`ResidentState`: what a publisher asks of its state. `StreamState` is one."""

from collections.abc import Iterator
from typing import Protocol

from kv_pool.core.kv_events import KVCacheEvent


class ResidentState(Protocol):
    """Knows what is resident by the events that went through it."""

    def apply(
        self, events: list[KVCacheEvent], sequence: int | None = None, *, packs_tokens: bool = False
    ) -> list[KVCacheEvent]:
        """Take note of the batch that gets this sequence; what to send in it instead, maybe nothing.

        The publisher's thread calls it, with sequences that go up. A batch without events says only that the
        sequence is taken.
        """

    def iter_snapshot(self) -> tuple[int, Iterator[list[KVCacheEvent]]]:
        """The sequence after which the events are true, and the events: a clear, then stores, parents first.

        Another thread calls it, and takes the lists, while batches go on.
        """
