"""The protocol of a publisher, its statistics and its buffer, and a publisher that sends nothing."""

import threading
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

from kv_pool.closing import Closing
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.errors import PublisherClosedError


@dataclass(slots=True)
class PublisherStatistics:
    """The counters of a publisher; all but the last two only grow.

    Attributes:
        num_batches_sent, num_events_sent, num_bytes_sent: sent live; bytes of payloads.
        num_empty_batches_sent: of these, heartbeats and steps for which the state had nothing to send.
        num_batches_dropped, num_events_dropped: dropped by a full queue, or not sent within `linger_s` of
            `close()`.
        num_batches_failed, num_events_failed: could not be encoded or sent, or were rejected by the state.
        num_replays: replay requests that were answered to the end marker.
        num_snapshots: snapshots sent.
        num_replays_abandoned: requests not answered, or not completely: the reader was gone or did not read.
        num_readers_dropped: of these, readers that read nothing for `slow_reader_s`, while their connections
            were open.
        num_malformed_requests: malformed requests on the replay socket, which were ignored.
        num_queued: batches currently queued for the publisher's thread.
        last_sequence: sequence of the latest batch, sent or failed; None before the first one.
    """

    num_batches_sent: int = 0
    num_events_sent: int = 0
    num_bytes_sent: int = 0
    num_empty_batches_sent: int = 0
    num_batches_dropped: int = 0
    num_events_dropped: int = 0
    num_batches_failed: int = 0
    num_events_failed: int = 0
    num_replays: int = 0
    num_snapshots: int = 0
    num_replays_abandoned: int = 0
    num_malformed_requests: int = 0
    num_readers_dropped: int = 0
    num_queued: int = 0
    last_sequence: int | None = None


class EventPublisher(Protocol):
    """A publisher of a pool's events.

    Attributes:
        endpoint, replay_endpoint: with the actual port; None if there is none.
    """

    endpoint: str | None
    replay_endpoint: str | None

    def publish(self, events: list[KVCacheEvent]) -> None:
        """Publish the events of one scheduler step as one batch. The publisher takes ownership of the list.

        An empty list is not sent. Never blocks; may be called from any thread.

        Raises:
            PublisherClosedError: after `close()`.
        """

    def get_statistics(self) -> PublisherStatistics: ...

    def close(self) -> None:
        """Send the batches published so far, and stop. Idempotent."""


class NullEventPublisher(Closing):
    """A publisher that discards events, for engines whose stream is turned off."""

    def __init__(self) -> None:
        self.endpoint: str | None = None
        self.replay_endpoint: str | None = None
        self._is_closed = False

    def publish(self, events: list[KVCacheEvent]) -> None:
        if self._is_closed:
            raise PublisherClosedError("the publisher is closed")

    def get_statistics(self) -> PublisherStatistics:
        return PublisherStatistics()

    def close(self) -> None:
        self._is_closed = True


SentBatch = tuple[int, bytes]
"""A sequence and its payload."""


class ReplayBuffer:
    """The last `capacity` batches. One thread appends, any thread reads.

    ```text
    first_sequence ... | oldest ... a hole ... last_sequence
       dropped           in the buffer, except for holes: batches that were never sent
    ```

    Attributes:
        last_sequence: sequence of the latest batch or hole; one below the first sequence at the start.
    """

    def __init__(self, capacity: int, first_sequence: int) -> None:
        self.last_sequence = first_sequence - 1
        self._batches: deque[SentBatch] = deque(maxlen=capacity)
        # An append to a full deque shifts the indices that a search in another thread uses.
        self._lock = threading.Lock()

    def append(self, sequence: int, payload: bytes) -> None:
        """Add a batch with a higher sequence than all others; drop the oldest beyond `capacity`. O(1)."""
        with self._lock:
            self._batches.append((sequence, payload))
            self.last_sequence = sequence

    def leave_hole(self, sequence: int) -> None:
        """Record that the batch with this sequence, higher than all others, will never be sent."""
        with self._lock:
            self.last_sequence = sequence

    def list_from(self, start: int, limit: int) -> list[SentBatch]:
        """Return the first `limit` buffered batches from `start` on, in order. No bytes are copied."""
        with self._lock:
            first = bisect_left(self._batches, start, key=itemgetter(0))
            return [self._batches[index] for index in range(first, min(first + limit, len(self._batches)))]

    def has_all_from(self, start: int) -> bool:
        """Return True if `list_from` would begin with `start` itself, or if `start` is in the future."""
        return start > self.last_sequence or any(number == start for number, _ in self.list_from(start, 1))


def is_worth_logging(count: int) -> bool:
    """Return True for the 1st, 2nd, 4th, 8th occurrence, and so on."""
    return count & (count - 1) == 0
