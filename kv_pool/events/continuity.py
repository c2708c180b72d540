"""`Continuity`: merges live and replayed batches into one stream in which every gap is reported.

```text
            live = expected                      replayed = expected
           +---------+                            +---------+
           v         |   gap, restart, reconnect  v         |
       following ----+---------------------> recovering ----+
           ^                                   |   live batches are queued meanwhile
           +---- end marker, then the queue ---+
```

No request is sent right after connecting: a ZeroMQ publisher learns of a subscription a moment later, and
batches sent between the answer and that moment are lost. If the publisher's buffer no longer has them, a
second snapshot is needed. The first request therefore waits for the first live batch, or for a short time.

Sequence numbers do not identify an incarnation of the publisher; payloads do. A request starts with the last
batch received: only the same incarnation has the same bytes for it. A live batch that was already replayed is
also recognized by its bytes, so any other number below the expected one means a new incarnation. This module
uses no sockets and no clock.

If requests are not answered, the missing batches are reported as lost and the stream continues live. From
then on all that the publisher has is requested, with growing pauses, until it answers: with a snapshot, or
with batches from before the loss, which are read again after a clear. Live batches do not wait for these
requests, and further gaps are lost at once.
"""

from collections import deque
from dataclasses import replace

import xxhash

from kv_pool.core.kv_events import AllBlocksCleared
from kv_pool.errors import EventStreamError
from kv_pool.events.batch import MAX_SEQUENCE, DecodedBatch, decode_lazily, is_snapshot
from kv_pool.events.stream_items import (
    BatchesLost,
    BatchRequest,
    PublisherRestarted,
    PublisherSilent,
    ReceivedBatch,
    StreamCounts,
    StreamItem,
    StreamSource,
)

_MAX_HEALING_WAITS = 64
_FOLLOW_AT_ONCE = 64
_MAX_FINGERPRINTS = 100_000


class GrowingPause:
    """A back-off timer: each pause is twice as long as the last one, up to `max_s` seconds.

    Attributes:
        due_s: time of the next attempt; None if none is planned.
    """

    def __init__(self, first_s: float, max_s: float) -> None:
        self.due_s: float | None = None
        self._first_s = self._next_s = first_s
        self._max_s = max_s

    def plan(self, now_s: float) -> None:
        """Begin the next pause."""
        self.due_s = now_s + self._next_s
        self._next_s = min(2 * self._next_s, self._max_s)

    def is_due(self, now_s: float) -> bool:
        return self.due_s is not None and now_s >= self.due_s

    def shorten(self) -> None:
        """Reset the next pause to the length of the first one."""
        self._next_s = self._first_s

    def end(self) -> None:
        """Cancel the planned attempt and reset the length of the next pause."""
        self.due_s = None
        self.shorten()


class QueuedBatches:
    """A queue of (sequence, payload) in order of arrival, bounded by count and by bytes.

    Beyond a bound the oldest batches are dropped: the publisher can still replay them. The newest batch is
    always kept, whatever its size.

    Attributes:
        num_bytes: total size of the held payloads.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[tuple[int, bytes]] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def first(self) -> tuple[int, bytes]:
        """The oldest batch, which stays in the queue. Raises IndexError if there is none."""
        return self._batches[0]

    def append(self, sequence: int, payload: bytes) -> None:
        """Add the newest batch, and drop the oldest while a bound is exceeded."""
        self._batches.append((sequence, payload))
        self.num_bytes += len(payload)
        while len(self._batches) > max(1, self._max_batches) or (
            self.num_bytes > self._max_bytes and len(self._batches) > 1
        ):
            self.pop()

    def put_back(self, sequence: int, payload: bytes) -> None:
        """Add a batch at the front, regardless of the bounds."""
        self._batches.appendleft((sequence, payload))
        self.num_bytes += len(payload)

    def pop(self) -> tuple[int, bytes]:
        """Remove the oldest batch and return it. Raises IndexError if there is none."""
        sequence, payload = self._batches.popleft()
        self.num_bytes -= len(payload)
        return sequence, payload

    def clear(self) -> None:
        self._batches.clear()
        self.num_bytes = 0


class ReplayedBatches:
    """Fingerprints of replayed batches, to be compared with live ones.

    A live batch with the bytes of a replayed one is the same batch. A live batch with the same number and
    other bytes belongs to another incarnation of the publisher.

    Attributes:
        passed: the number up to which live batches are included in a snapshot or were reported as lost; None
            if there are none.
        last_live: the number of the last live batch, whether it was returned to the caller or not; None
            before the first one of an incarnation.

    Memory: one fingerprint for each of the last 100,000 replayed batches.
    """

    def __init__(self) -> None:
        self.passed: int | None = None
        self.last_live: int | None = None
        self._fingerprints: dict[int, int] = {}

    def add(self, sequence: int, fingerprint: int) -> None:
        """Record a replayed batch."""
        if len(self._fingerprints) >= _MAX_FINGERPRINTS:
            del self._fingerprints[next(iter(self._fingerprints))]
        self._fingerprints[sequence] = fingerprint

    def forget(self, passed: int | None = None) -> None:
        """Forget all replayed batches; set `passed`."""
        self._fingerprints.clear()
        self.passed = passed

    def begin_incarnation(self) -> None:
        """Forget all batches: the publisher has restarted."""
        self.forget()
        self.last_live = None

    def contradicts(self, sequence: int, payload: bytes) -> bool:
        """Return True if a different batch was replayed under this number."""
        return self._fingerprints.get(sequence) not in (None, make_fingerprint(payload))

    def contains(self, sequence: int, payload: bytes) -> bool:
        """Return True if this live batch was replayed, or its number is at most `passed`.

        Numbers only grow on one connection: a number up to the last live one is from another incarnation.
        """
        if self._fingerprints.get(sequence) == make_fingerprint(payload):
            return True
        if self.passed is None or sequence > self.passed:
            return False
        return self.last_live is None or sequence > self.last_live


def make_fingerprint(payload: bytes) -> int:
    """Return a 64-bit hash of a payload, to compare it with payloads that are no longer kept."""
    return xxhash.xxh3_64_intdigest(payload)


class Continuity:
    """A state machine that orders batches, requests missing ones and reports lost ones.

    Each `take_*` method takes the current time and returns stream items in order. After each call the caller
    sends `request` to the publisher if it is a new object, over a new connection, so that late replies to the
    previous request are not mistaken for replies to this one; None means no request. The caller calls
    `handle_timers` at `deadline`.

    Args:
        can_replay: whether the publisher has a replay endpoint. If not, each gap is a loss.
        now: current time, in seconds of a monotonic clock.
        replay_timeout_s: a request is repeated after this long without a reply.
        max_attempts: after this many requests in a row without a new batch, the missing batches are lost;
            healing starts `replay_timeout_s` later. Its pauses double, up to 64 times `replay_timeout_s`.
            Until a request is answered, a new connection is followed by one request only, and a gap by none.
        silence_after_s: after this long without a message the publisher is probed, then reported as silent.
            None for publishers without heartbeats.
        max_queued, max_queued_bytes: bounds on the live batches queued during a replay; beyond them the
            oldest are dropped, since the publisher can replay them.
        settle_s: delay of the request after the start and after each connection. After the first connection
            a live batch ends the delay; after a later one the batch may be from the previous incarnation.
            None to send the request at once.

    Attributes:
        source: the publisher, which the items name.
        expected: the sequence of the next batch; None if no batch of this incarnation was received.

    After an answer the queued batches are returned in portions: call `take_queued` while `has_ready`.
    Memory: at most `max_queued` payloads with `max_queued_bytes` in total, plus `ReplayedBatches`.
    """

    def __init__(
        self,
        can_replay: bool,
        now: float,
        replay_timeout_s: float = 5.0,
        max_attempts: int = 3,
        silence_after_s: float | None = None,
        max_queued: int = 10_000,
        max_queued_bytes: int = 64 * 2**20,
        settle_s: float | None = 0.25,
    ) -> None:
        self.can_replay = can_replay
        self.replay_timeout_s = replay_timeout_s
        self.max_attempts = max_attempts
        self.silence_after_s = silence_after_s
        self.request: BatchRequest | None = None
        self.is_silent = False
        self.source = StreamSource()
        self._rank: int | None = None
        self._counts = StreamCounts()
        self._queued = QueuedBatches(max_queued, max_queued_bytes)
        self._last_message_at = now
        self._num_fruitless = 0
        self._was_connected = False
        self._settle_s = settle_s
        self._settled_at: float | None = None
        # The connection was lost: the publisher may have restarted since.
        self._is_doubtful = False
        self.expected: int | None = None
        self._last_fingerprint: int | None = None
        self._replayed = ReplayedBatches()
        # First sequence after the last loss: 0 after a clear, None if no batch was received since.
        self._known_since: int | None = None
        self._healing = GrowingPause(replay_timeout_s, _MAX_HEALING_WAITS * replay_timeout_s)
        if can_replay:
            self._settle_and_ask(now)

    @property
    def is_recovering(self) -> bool:
        """Whether live batches are queued for an answer, even if the request is not sent yet."""
        return self._settled_at is not None or (self.request is not None and not self.request.is_healing)

    @property
    def is_incomplete(self) -> bool:
        """Whether batches may be missing because requests were unanswered; requests will be repeated."""
        return self._healing.due_s is not None

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    @property
    def has_ready(self) -> bool:
        """Whether `take_queued` has queued batches to return."""
        return len(self._queued) > 0 and not self.is_recovering

    @property
    def deadline(self) -> float | None:
        """The time at which `handle_timers` must run if no message arrives first; None if no timer is set."""
        if self.request is not None:
            return self.request.deadline
        times = [time for time in (self._settled_at, self._healing.due_s) if time is not None]
        if self.silence_after_s is not None and not self.is_silent:
            times.append(self._last_message_at + self.silence_after_s)
        return min(times, default=None)

    def get_counts(self) -> StreamCounts:
        """Return a copy of the counters."""
        return replace(self._counts)

    # ---- inputs ----------------------------------------------------------------------------------

    def handle_live(self, sequence: int, payload: bytes, now: float) -> list[StreamItem]:
        """Handle a live batch."""
        self._note_message(now)
        if self._settled_at is not None and not self._is_doubtful:
            self._ask(now)
        if self.is_recovering or self._queued:
            self._queued.append(sequence, payload)
            return self.take_queued(now)
        return self._follow(sequence, payload, now)

    def handle_replayed(self, sequence: int, payload: bytes, now: float) -> list[StreamItem]:
        """Handle a batch received in answer to `request`."""
        request = self.request
        if request is None:
            return []
        self._note_message(now)
        request.deadline = now + self.replay_timeout_s
        request.num_replies += 1
        is_first = request.num_replies == 1
        if request.is_healing:
            return self._take_healing_reply(request, sequence, payload)
        expected = self.expected
        if sequence == expected and not (is_first and self._is_doubtful):
            delivered = self._deliver(sequence, payload, True)
            self._pass_filled(delivered[0], payload)
            return delivered
        is_last_again = is_first and request.is_overlapping and sequence == request.start
        if is_last_again and make_fingerprint(payload) == self._last_fingerprint:
            self._is_doubtful = False
            return []
        if is_snapshot(payload) and (is_first or (expected is not None and sequence > expected)):
            return self._take_snapshot(sequence, payload)
        if is_last_again or (is_first and self._is_doubtful and expected is not None):
            return [self._begin_incarnation(), *self._ask(now)]
        if expected is not None and sequence < expected:
            self._counts.num_duplicates += 1
            return []
        if is_first:  # the expected batch has left the publisher's buffer, and there is no snapshot
            if sequence > (expected or 0):
                # Queued live batches below it are lost, too: they may be from a previous incarnation.
                self._replayed.passed = sequence
            return self._deliver_after_gap(sequence, payload, True)
        # A hole inside an answer: queued live batches may fill it. If not, the batch was dropped on the way
        # or never sent; the next answer shows which.
        items = self._fill_from_queued(sequence)
        if self.expected == sequence:
            return items + self._deliver(sequence, payload, True)
        return items + self._ask(now, is_overlapping=False)

    def handle_replay_end(self, now: float) -> list[StreamItem]:
        """Handle the end marker of the answer to `request`."""
        request = self.request
        if request is None:
            return []
        self._note_message(now)
        self.request = None
        if request.is_healing:  # the publisher has no batches
            self._healing.end()
            return []
        if self.is_incomplete:
            self._healing.due_s = now  # requests are answered again
        is_empty = request.num_replies == 0 and self.expected is not None
        if is_empty and (request.is_overlapping or self._is_doubtful):
            # A publisher keeps at least its newest batch: this one never sent the last batch received.
            return [self._begin_incarnation(), *self._ask(now)]
        self._num_fruitless += 1  # reset when a batch is returned
        return self.take_queued(now)

    def handle_timers(self, now: float) -> list[StreamItem]:
        """Handle expired timers. Call it at `deadline`; safe at any other time."""
        request = self.request
        if request is None:
            if self.deadline is None or now < self.deadline:
                return []
            if self._settled_at is not None and now >= self._settled_at:
                return self._ask(now)
            if self._healing.is_due(now):
                self._ask_to_heal(now)
                return []
            if self.can_replay and not self.is_incomplete:
                self._ask(now, is_probe=True)
                return []
            return [self._fall_silent(now)]
        if now < request.deadline:
            return []
        self._counts.num_timeouts += 1
        if request.is_healing:
            self.request = None
            return []
        self._num_fruitless += 1
        if self._num_fruitless < self.max_attempts:
            return self._ask(now, is_overlapping=request.is_overlapping, is_probe=request.is_probe)
        self.request = None
        if request.is_probe and not self._queued:
            self._num_fruitless = 0
            return [self._fall_silent(now)]
        self._healing.plan(now)
        if self._is_doubtful and self.expected is not None:
            # It may be another incarnation, so no earlier state is valid.
            items = [self._begin_incarnation()]
            self._num_fruitless = self.max_attempts
            return items + self.take_queued(now)
        return self.take_queued(now)

    def handle_connection(self, now: float) -> list[StreamItem]:
        """Handle a new live connection. Call this before the batches that arrive over it.

        After a reconnection the publisher may have restarted: live batches are queued until an answer repeats
        the last batch or shows that it is gone. Batches queued earlier and the current request are dropped:
        they may be from the previous incarnation, and if they are not, the next answer repeats them.
        """
        if not self.can_replay:
            return []
        is_unanswered = self._was_connected and self.is_incomplete
        self._num_fruitless = self.max_attempts - 1 if is_unanswered else 0
        self._is_doubtful = self._was_connected
        self._was_connected = True
        self._queued.clear()
        self._settle_and_ask(now)
        return []

    # ---- inside ----------------------------------------------------------------------------------

    def take_queued(self, now: float) -> list[StreamItem]:
        """Return some of the queued batches; none while they have to wait for an answer."""
        items: list[StreamItem] = []
        for _ in range(_FOLLOW_AT_ONCE):
            if not self._queued or self.is_recovering:
                break
            sequence, payload = self._queued.pop()
            items += self._follow(sequence, payload, now, has_waited=True)
        if not self._queued and not self.is_recovering:
            self._num_fruitless = 0
        return items

    def _follow(
        self, sequence: int, payload: bytes, now: float, has_waited: bool = False
    ) -> list[StreamItem]:
        """Handle a live batch while no request is pending; `has_waited` if it was queued during one."""
        if self.expected is None or sequence >= self.expected:
            return self._deliver_or_recover(sequence, payload, now)
        if has_waited and self._replayed.contradicts(sequence, payload):
            self._counts.num_stale += 1  # the later answer has another batch with this number
            return []
        is_known = self._replayed.contains(sequence, payload)
        self._replayed.last_live = sequence
        if is_known:
            self._counts.num_duplicates += 1
            return []
        return [self._begin_incarnation(), *self._deliver_or_recover(sequence, payload, now)]

    def _deliver_or_recover(self, sequence: int, payload: bytes, now: float) -> list[StreamItem]:
        """Handle a live batch that is the expected one, or comes after it."""
        has_gap = sequence > (self.expected or 0)
        is_worth_asking = self._num_fruitless < min(self.max_attempts, 2) and not self.is_incomplete
        if has_gap and self.can_replay and is_worth_asking:
            self._queued.put_back(sequence, payload)
            return self._ask(now)
        items = self._deliver_after_gap(sequence, payload, False, is_healed=has_gap and is_snapshot(payload))
        self._replayed.last_live = sequence
        self._replayed.forget()
        return items

    def _deliver_after_gap(
        self, sequence: int, payload: bytes, is_replayed: bool, is_healed: bool = False
    ) -> list[StreamItem]:
        """Deliver a batch; the batches before it, from the expected one on, are lost.

        Before the first batch ever, a snapshot skips nothing, and a reader that cannot request earlier ones
        loses nothing: numbers may begin anywhere, such as at a clock's time.
        """
        is_first_ever = self.expected is None and not self._counts.num_restarts
        is_beginning = is_first_ever and (is_healed or not self.can_replay)
        first = sequence if is_beginning else self.expected or 0
        lost = [self._lose(first, sequence - 1, is_healed)] if sequence > first else []
        return lost + self._deliver(sequence, payload, is_replayed)

    def _deliver(
        self, sequence: int, payload: bytes, is_replayed: bool, is_read_again: bool = False
    ) -> list[StreamItem]:
        self.expected = sequence + 1
        self._last_fingerprint = make_fingerprint(payload)
        self._num_fruitless = 0
        if is_replayed:
            self._replayed.add(sequence, self._last_fingerprint)
        try:
            batch = decode_lazily(payload)
        except EventStreamError:
            self._counts.num_malformed += 1
            return [self._lose(sequence, sequence)]
        if batch.data_parallel_rank != self._rank:
            self._check_rank(batch.data_parallel_rank)
        self._counts.num_batches += 1
        self._counts.num_replayed += is_replayed
        self._counts.num_dropped_events += batch.num_dropped
        if is_read_again:
            batch = DecodedBatch(batch.ts, [AllBlocksCleared(), *batch.events], batch.data_parallel_rank)
        item = ReceivedBatch(sequence, batch, is_replayed, self.source)
        if item.is_reset and not is_read_again:
            self._known_since = 0
        elif self._known_since is None or is_read_again:
            self._known_since = sequence
        if self.is_incomplete and (is_read_again or self._known_since == 0):
            self._counts.num_heals += 1
            self._healing.end()
        return [item]

    def _check_rank(self, rank: int | None) -> None:
        if self._rank is not None and rank is not None:
            raise EventStreamError(
                f"publishers with ranks {self._rank} and {rank} send under the topic {self.source.topic!r}; "
                "give each publisher a topic, or an endpoint"
            )
        self._rank = rank

    def _take_snapshot(self, sequence: int, payload: bytes) -> list[StreamItem]:
        """Handle a snapshot, which replaces all batches up to its number."""
        items = self._deliver_after_gap(sequence, payload, True, is_healed=True)
        self._is_doubtful = False
        self._last_fingerprint = None  # the publisher has another batch with this number
        self._replayed.forget(passed=sequence)
        self._counts.num_snapshots += 1
        return items

    def _take_healing_reply(self, request: BatchRequest, sequence: int, payload: bytes) -> list[StreamItem]:
        """Handle the first batch of an answer to a healing request.

        If it is useful, the rest of the answer is read like any other, and live batches are queued.
        """
        if is_snapshot(payload):
            request.is_healing = False
            return self._take_snapshot(sequence, payload)
        if self._known_since is not None and sequence >= self._known_since:
            self.request = None  # the publisher has no batch from before the loss
            self._healing.end()
            return []
        request.is_healing = False
        self._replayed.forget(passed=sequence)
        return self._deliver(sequence, payload, True, is_read_again=True)

    def _pass_filled(self, item: StreamItem, payload: bytes) -> None:
        """Note that a snapshot includes the live batch of this number.

        A publisher sends a snapshot under the requested number, then empty batches up to the last batch that
        the snapshot includes.
        """
        if isinstance(item, ReceivedBatch):
            is_filled = self._replayed.passed == item.sequence - 1 and not item.batch.events
            if is_filled or is_snapshot(payload):
                self._replayed.passed = item.sequence

    def _fill_from_queued(self, end: int) -> list[StreamItem]:
        """Return queued live batches that are next in order, up to `end` (exclusive)."""
        items: list[StreamItem] = []
        while self._queued and self.expected is not None:
            sequence, payload = self._queued.first
            if sequence > self.expected or sequence >= end:
                break
            if sequence == self.expected:
                items += self._deliver(sequence, payload, False)
            elif not self._replayed.contains(sequence, payload):
                break
            self._queued.pop()
            self._replayed.last_live = sequence
        return items

    def _begin_incarnation(self) -> StreamItem:
        self.expected = None
        self._last_fingerprint = None
        self._is_doubtful = False
        self._replayed.begin_incarnation()
        self._num_fruitless = 0
        self._known_since = None
        self._counts.num_restarts += 1
        return PublisherRestarted(self.source)

    def _lose(self, first: int, last: int, is_healed: bool = False) -> StreamItem:
        if is_healed:
            self._counts.num_skipped += last - first + 1
        else:
            self._counts.num_lost += last - first + 1
            self._known_since = None
        return BatchesLost(first, last, is_healed, self.source)

    def _ask(self, now: float, is_overlapping: bool = True, is_probe: bool = False) -> list[StreamItem]:
        """Request the next batches, starting with the last batch received if overlapping."""
        is_overlapping = is_overlapping and bool(self.expected) and self._last_fingerprint is not None
        start = min((self.expected or 0) - is_overlapping, MAX_SEQUENCE)
        self._settled_at = None
        self.request = BatchRequest(start, is_overlapping, now + self.replay_timeout_s, is_probe)
        self._counts.num_requests += 1
        return []

    def _ask_to_heal(self, now: float) -> None:
        """Request all batches that the publisher has."""
        self._healing.plan(now)
        self.request = BatchRequest(0, False, now + self.replay_timeout_s, is_healing=True)
        self._counts.num_requests += 1

    def _settle_and_ask(self, now: float) -> None:
        if self._settle_s is None:
            self._ask(now)
            return
        self.request = None
        self._settled_at = now + self._settle_s

    def _note_message(self, now: float) -> None:
        self._last_message_at = now
        self.is_silent = False

    def _fall_silent(self, now: float) -> StreamItem:
        self.is_silent = True
        self._counts.num_silences += 1
        return PublisherSilent(now - self._last_message_at, self.source)
