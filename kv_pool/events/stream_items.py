"""The items of an event stream as a subscriber hands them on, and what is asked and counted on the way."""

from dataclasses import dataclass

from kv_pool.core.kv_events import AllBlocksCleared
from kv_pool.events.batch import DecodedBatch


@dataclass(frozen=True, slots=True)
class ReceivedBatch:
    """The next batch of the stream.

    Attributes:
        sequence: its number; one more than that of the batch before, unless an item between says otherwise
            or `is_reset` is true.
        batch: the decoded payload. When the stream is read again to make up for an earlier loss, the first
            batch begins with an `AllBlocksCleared` that the subscriber added.
        is_replayed: it came on request, not live.
    """

    sequence: int
    batch: DecodedBatch
    is_replayed: bool = False

    @property
    def is_reset(self) -> bool:
        """It begins with a clear: whatever was missed before does not matter for the state after it."""
        events = self.batch.unread_events
        return bool(events) and isinstance(events[0], AllBlocksCleared)


@dataclass(frozen=True, slots=True)
class BatchesLost:
    """Batches `first` to `last` will not come.

    Attributes:
        is_healed: the next item is a snapshot, or another batch that begins with a clear: events are
            missing, the state is not.
    """

    first: int
    last: int
    is_healed: bool = False


@dataclass(frozen=True, slots=True)
class PublisherRestarted:
    """What comes next is a new life of the publisher: nothing it said before holds any more."""


@dataclass(frozen=True, slots=True)
class PublisherSilent:
    """Nothing came for so long, and a request, where one is possible, was not answered. Said once."""

    num_seconds: float


StreamItem = ReceivedBatch | BatchesLost | PublisherRestarted | PublisherSilent


@dataclass(eq=False, slots=True)
class ReplayRequest:
    """What to ask the publisher for; each is a new object.

    Attributes:
        start: the first sequence wanted.
        is_overlapping: `start` is the last batch that was taken, wanted for its bytes.
        deadline: when to give it up, by the caller's clock; moves on with each reply.
        is_probe: asked because of silence.
        is_healing: asked to make up for an earlier loss; live batches are handed on until the answer begins.
    """

    start: int
    is_overlapping: bool
    deadline: float
    is_probe: bool = False
    is_healing: bool = False
    num_replies: int = 0


@dataclass(slots=True)
class ContinuityCounts:
    """What happened so far.

    Attributes:
        num_batches: handed on, live or replayed.
        num_replayed: of these, those that came on request.
        num_lost: batches that will not come and that no snapshot made up for.
        num_skipped: numbers that a snapshot stands for.
        num_snapshots: batches beginning with a clear that came on request out of turn.
        num_duplicates: batches that came again, live after replayed.
        num_stale: live batches of a life that was over already.
        num_malformed: payloads that are no batch; each is lost, too.
        num_dropped_events: events of unknown types, or malformed other than in their tokens, in batches that
            were handed on.
        num_restarts: new lives of the publisher.
        num_requests, num_timeouts: replays asked for, and those not answered in time.
        num_silences: times that nothing came for too long.
        num_heals: earlier losses that a later answer made up for.
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
