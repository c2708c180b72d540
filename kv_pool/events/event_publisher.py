"""The counters of publishers, their protocol, and a publisher that sends nothing."""

import logging
from dataclasses import dataclass
from typing import Any, Protocol

from kv_pool.closing import Closing
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.errors import PublisherClosedError

_logger = logging.getLogger(__name__)


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

    def count_sent(self, events: Any, num_bytes: int) -> None:
        """Count a batch that was sent live, with a payload of `num_bytes`."""
        self.num_batches_sent += 1
        self.num_events_sent += len(events)
        self.num_bytes_sent += num_bytes
        self.num_empty_batches_sent += not events

    def count_dropped(self, events: Any, num_queued: int) -> None:
        """Count a batch that is dropped, and log some of these occurrences."""
        self.num_batches_dropped += 1
        self.num_events_dropped += _count(events)
        if is_worth_logging(self.num_batches_dropped):
            _logger.warning(
                "%d batches of events dropped so far, %d are queued; raise max_queue_size to queue more",
                self.num_batches_dropped,
                num_queued,
            )

    def count_failed(self, events: Any) -> None:
        """Count a batch that failed with the exception being handled, and log some of these occurrences."""
        self.num_batches_failed += 1
        self.num_events_failed += _count(events)
        if is_worth_logging(self.num_batches_failed):
            _logger.exception("%d batches of events failed so far", self.num_batches_failed)


def is_worth_logging(count: int) -> bool:
    """Return True for the 1st, 2nd, 4th, 8th occurrence, and so on."""
    return count & (count - 1) == 0


def _count(events: Any) -> int:
    """Return the number of events; an invalid argument without a length counts as one."""
    try:
        return len(events)
    except TypeError:
        return 1


# ---- publishers --------------------------------------------------------------------------------------


class EventPublisher(Protocol):
    """A publisher of a pool's events.

    Attributes:
        endpoint, replay_endpoint: with the actual port; None if there is none.
    """

    endpoint: str | None
    replay_endpoint: str | None

    def publish(self, events: list[KVCacheEvent]) -> None:
        """Publish the events of one scheduler step as one batch. The publisher takes ownership of the list.

        An empty list is not sent. Never waits for a socket, an encoder or a reader. May be called from any
        thread; the batches of one thread are sent in order.

        Raises:
            PublisherClosedError: after `close()`.
        Cost: O(1), independent of the number of events.
        """

    def get_statistics(self) -> PublisherStatistics:
        """Return the counters; a batch that is being sent may be in only some of them."""

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
