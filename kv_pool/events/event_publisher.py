"""What a publisher is: the protocol, its numbers, and the one that sends nothing."""

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.errors import PublisherClosedError


@dataclass(frozen=True, slots=True)
class PublisherStatistics:
    """What a publisher has done so far; all but the last three only grow.

    Attributes:
        num_batches_sent, num_events_sent, num_bytes_sent: live; bytes of payloads.
        num_empty_batches_sent: among them: heartbeats, and steps of which the state had nothing to tell.
        num_batches_dropped, num_events_dropped: by a full queue, or not sent before `close()` gave up.
        num_batches_failed, num_events_failed: could not be encoded, or the state refused them.
        num_replays: replay requests that got their end marker.
        num_snapshots: of those, the ones that got a snapshot.
        num_replays_abandoned: not answered, or not to the end, since the reader was gone or did not read.
        num_malformed_requests: on the replay socket, ignored.
        num_readers_dropped: connections closed since their readers did not read: live beyond
            `max_unread_bytes`, replays for `slow_reader_s`.
        num_readers_refused: connections closed since `max_readers` were open.
        num_readers: connections now, to both sockets.
        num_queued: batches that wait for the publisher's thread now.
        last_sequence: of the latest batch, sent or failed; None before the first one.
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
    num_readers_refused: int = 0
    num_readers: int = 0
    num_queued: int = 0
    last_sequence: int | None = None


class EventPublisher(Protocol):
    """Takes a pool's events and sends them to whoever listens.

    Attributes:
        endpoint, replay_endpoint: where, with the real port; None for nowhere.
    """

    endpoint: str | None
    replay_endpoint: str | None

    def publish(self, events: list[KVCacheEvent]) -> None:
        """Hand over the events of one scheduler step, as one batch; they belong to the publisher now.

        No events, no batch. Never blocks, and may be called from any thread.

        Raises:
            PublisherClosedError: after `close()`.
        """

    def statistics(self) -> PublisherStatistics: ...

    def close(self) -> None:
        """Send what was published so far, and stop. Does nothing the second time."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class NullEventPublisher:
    """Takes events and sends none, for engines whose stream is turned off."""

    def __init__(self) -> None:
        self.endpoint: str | None = None
        self.replay_endpoint: str | None = None
        self._is_closed = False

    def publish(self, events: list[KVCacheEvent]) -> None:
        if self._is_closed:
            raise PublisherClosedError("the publisher is closed")

    def statistics(self) -> PublisherStatistics:
        return PublisherStatistics()

    def close(self) -> None:
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
