"""The items of a subscriber's event stream, its replay requests and its counters."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from typing import NamedTuple

from kv_pool.core.kv_events import AllBlocksCleared
from kv_pool.events.batch import DecodedBatch


class StreamSource(NamedTuple):
    """The publisher of an item, as far as messages tell it apart.

    Attributes:
        topic: the topic of its messages.
        rank: its data-parallel rank, for subscribers that bind and request no replays; otherwise None.
    """

    topic: str = ""
    rank: int | None = None


_UNKNOWN = StreamSource()


@dataclass(frozen=True, slots=True)
class ReceivedBatch:
    """The next batch of the stream.

    Attributes:
        sequence: one more than that of the previous batch, unless a `BatchesLost` or `PublisherRestarted`
            came in between or `is_reset` is true.
        batch: the decoded payload. If the stream is read again to heal an earlier loss, the first batch
            begins with an `AllBlocksCleared` that the subscriber added.
        is_replayed: whether the batch was requested rather than received live.
        source: the publisher.
    """

    sequence: int
    batch: DecodedBatch
    is_replayed: bool = False
    source: StreamSource = field(default=_UNKNOWN, compare=False, repr=False)

    @property
    def is_reset(self) -> bool:
        """Whether the batch begins with a clear, so that the state after it needs no earlier batch."""
        events = self.batch.unread_events
        return bool(events) and isinstance(events[0], AllBlocksCleared)


@dataclass(frozen=True, slots=True)
class BatchesLost:
    """Batches `first` to `last` (inclusive) are lost.

    Attributes:
        is_healed: whether the next item is a snapshot or another batch that begins with a clear: events are
            missing, but the state will be complete.
    """

    first: int
    last: int
    is_healed: bool = False
    source: StreamSource = field(default=_UNKNOWN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PublisherRestarted:
    """The publisher has restarted: state from its earlier batches is no longer valid."""

    source: StreamSource = field(default=_UNKNOWN, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PublisherSilent:
    """No message arrived for `num_seconds`, and a replay request, if possible, was not answered.

    Reported once, until the next message.
    """

    num_seconds: float
    source: StreamSource = field(default=_UNKNOWN, compare=False, repr=False)


StreamItem = ReceivedBatch | BatchesLost | PublisherRestarted | PublisherSilent


@dataclass(eq=False, slots=True)
class BatchRequest:
    """A replay request; each request is a new object.

    Attributes:
        start: the first sequence requested.
        is_overlapping: whether `start` is the last batch received, requested to compare its bytes.
        deadline: when the request times out, by the caller's clock; extended by each reply.
        is_probe: whether it was sent because the publisher was silent.
        is_healing: whether it is to heal an earlier loss; live batches continue until the answer begins.
    """

    start: int
    is_overlapping: bool
    deadline: float
    is_probe: bool = False
    is_healing: bool = False
    num_replies: int = 0


@dataclass(slots=True)
class StreamCounts:
    """The counters of a stream.

    Attributes:
        num_batches: batches returned, live or replayed.
        num_replayed: of these, the replayed ones.
        num_lost: batches lost and not replaced by a snapshot.
        num_skipped: batches replaced by a snapshot.
        num_snapshots: replayed batches that begin with a clear and replace the expected batch.
        num_duplicates: batches received twice, such as live after replayed.
        num_stale: live batches of a previous incarnation.
        num_malformed: payloads that are not batches; also counted as lost.
        num_dropped_events: events of unknown types or with malformed fields other than tokens, in batches
            that were returned.
        num_restarts: restarts of the publisher.
        num_requests, num_timeouts: replay requests sent, and those not answered in time.
        num_silences: number of times the publisher became silent.
        num_heals: earlier losses that a later answer healed.
    """

    num_batches: int = 0
    num_replayed: int = 0
    num_lost: int = 0
    num_skipped: int = 0
    num_snapshots: int = 0
    num_duplicates: int = 0
    num_stale: int = 0
    num_malformed: int = 0
    num_dropped_events: int = 0
    num_restarts: int = 0
    num_requests: int = 0
    num_timeouts: int = 0
    num_silences: int = 0
    num_heals: int = 0


def sum_counts(several: Iterable[StreamCounts]) -> StreamCounts:
    """Return the counters of several streams together."""
    return StreamCounts(*map(sum, zip(*map(astuple, several), strict=True)))
