"""`Continuity`: from numbered batches, live and replayed, to a stream without silent holes.

```text
            live = expected                      replayed = expected
           +---------+                            +---------+
           v         |   gap, restart, reconnect  v         |
       following ----+---------------------> recovering ----+
           ^                                   |   live batches are held meanwhile
           +------- end marker, then held -----+
```

After a connection nothing is asked for yet: ZeroMQ's publishers learn of a subscription a moment later, and
what is sent between the answer and that moment is lost. Where that is more than the publisher's buffer
holds, it would take a second snapshot. So the first live batch, or a short while without one, comes before.

What numbers cannot tell, bytes do: a request begins with the last batch that was taken, and only the same
life of the publisher has the same bytes for it. A live batch that was replayed already is known by its bytes,
too, so that any other number below the expected one is a new life. No sockets and no clock in here.

When requests are not answered, what is missing is stated as lost and the stream goes on live. From then on
the publisher is asked for everything it has, with growing pauses, until it answers: with a snapshot, or with
batches from before the loss, which are read again behind a clear. Live batches do not wait for these
requests.
"""

from dataclasses import replace

from kv_pool.core.kv_events import AllBlocksCleared
from kv_pool.errors import EventStreamError
from kv_pool.events.batch import DecodedBatch, decode_lazily
from kv_pool.events.growing_pause import GrowingPause
from kv_pool.events.held_batches import HeldBatches
from kv_pool.events.replayed_batches import ReplayedBatches, make_fingerprint
from kv_pool.events.sequence_frames import MAX_SEQUENCE
from kv_pool.events.snapshot_batch import is_snapshot
from kv_pool.events.stream_items import (
    BatchesLost,
    ContinuityCounts,
    PublisherRestarted,
    PublisherSilent,
    ReceivedBatch,
    ReplayRequest,
    StreamItem,
)

_MAX_HEALING_WAITS = 64
_FOLLOW_AT_ONCE = 64


class Continuity:
    """Puts batches in order, says what to ask for, and names what is lost.

    Each `take_*` is told the time and returns what to hand on, in order. After it, `request` is what should
    be asked of the publisher: a new object means a new request, on a new connection, so that late replies to
    the one before are not taken for its own; None means none. `deadline` is when `take_time` wants to be
    called.

    Args:
        can_replay: there is someone to ask. If not, each gap is a loss.
        now: the time, in seconds of any clock that only goes forward.
        replay_timeout_s: without a reply for so long a request is repeated.
        max_attempts: after this many requests in a row without one batch gained, what is missing is lost;
            healing begins `replay_timeout_s` later, and is tried again after twice the last pause, at most
            64 times `replay_timeout_s`.
        silence_after_s: without any sign of life for so long, the publisher is asked, then called silent.
            None for publishers that may have nothing to say.
        max_held, max_held_bytes: live batches kept during a replay, and their bytes; beyond that the oldest
            are dropped, since the replay has them.
        settle_s: so long after the start and after a connection was made the publisher is asked; at the first
            one as soon as something comes live, if that is sooner. At a later one that could be from before.
            None to ask at once.

    After an answer the batches that waited are handed on in portions: call `take_held` while `has_ready`.
    Memory: at most `max_held` payloads of `max_held_bytes` together, and what `ReplayedBatches` takes.
    """

    def __init__(
        self,
        can_replay: bool,
        now: float,
        replay_timeout_s: float = 5.0,
        max_attempts: int = 3,
        silence_after_s: float | None = None,
        max_held: int = 10_000,
        max_held_bytes: int = 64 * 2**20,
        settle_s: float | None = 0.25,
    ) -> None:
        self.can_replay = can_replay
        self.replay_timeout_s = replay_timeout_s
        self.max_attempts = max_attempts
        self.silence_after_s = silence_after_s
        self.request: ReplayRequest | None = None
        self.is_silent = False
        self._counts = ContinuityCounts()
        self._held = HeldBatches(max_held, max_held_bytes)
        self._last_life = now
        self._num_fruitless = 0
        self._was_connected = False
        self._settle_s = settle_s
        self._settled_at: float | None = None
        # The connection was lost: it is not known yet whether this is still the same life.
        self._is_doubtful = False
        self._expected: int | None = None
        self._last_fingerprint: int | None = None
        self._replayed = ReplayedBatches()
        # The first sequence since which nothing was lost: 0 behind a clear, None when nothing came since.
        self._known_since: int | None = None
        self._healing = GrowingPause(replay_timeout_s, _MAX_HEALING_WAITS * replay_timeout_s)
        if can_replay:
            self._settle_and_ask(now)

    @property
    def expected(self) -> int | None:
        """The sequence of the next batch; None while nothing is known of the publisher."""
        return self._expected

    @property
    def is_recovering(self) -> bool:
        """Live batches wait for an answer; it may be that it was not asked for yet."""
        return self._settled_at is not None or (self.request is not None and not self.request.is_healing)

    @property
    def is_incomplete(self) -> bool:
        """Requests were not answered, so batches may be missing; the publisher will be asked again."""
        return self._healing.due_s is not None

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def has_ready(self) -> bool:
        """Batches that waited can be handed on now: `take_held` has something to do."""
        return len(self._held) > 0 and not self.is_recovering

    @property
    def deadline(self) -> float | None:
        """When `take_time` should be called if nothing comes before; None for never."""
        if self.request is not None:
            return self.request.deadline
        times = [time for time in (self._settled_at, self._healing.due_s) if time is not None]
        if self.silence_after_s is not None and not self.is_silent:
            times.append(self._last_life + self.silence_after_s)
        return min(times, default=None)

    def counts(self) -> ContinuityCounts:
        """A copy."""
        return replace(self._counts)

    # ---- what happens ----------------------------------------------------------------------------

    def take_live(self, sequence: int, payload: bytes, now: float) -> list[StreamItem]:
        """A batch came live."""
        self._note_life(now)
        if self._settled_at is not None and not self._is_doubtful:
            self._ask(now)
        if self.is_recovering or self._held:
            self._held.append(sequence, payload)
            return self.take_held(now)
        return self._follow(sequence, payload, now)

    def take_held(self, now: float) -> list[StreamItem]:
        """Hand on some of the batches that waited; none while they still have to wait."""
        return self._follow_held(now) if self.has_ready else []

    def take_replayed(self, sequence: int, payload: bytes, now: float) -> list[StreamItem]:
        """A batch came in answer to `request`."""
        request = self.request
        if request is None:
            return []
        self._note_life(now)
        request.deadline = now + self.replay_timeout_s
        request.num_replies += 1
        is_first = request.num_replies == 1
        if request.is_healing:
            return self._take_healing_reply(request, sequence, payload)
        expected = self._expected
        if sequence == expected and not (is_first and self._is_doubtful):
            handed_on = self._hand_on(sequence, payload, True)
            self._pass_filled(handed_on[0], payload)
            return handed_on
        is_last_again = is_first and request.is_overlapping and sequence == request.start
        if is_last_again and make_fingerprint(payload) == self._last_fingerprint:
            self._is_doubtful = False
            return []
        if is_snapshot(payload) and (is_first or (expected is not None and sequence > expected)):
            return self._take_snapshot(sequence, payload)
        if is_last_again or (is_first and self._is_doubtful and expected is not None):
            return [self._begin_new_life(), *self._ask(now)]
        if expected is not None and sequence < expected:
            self._counts.num_duplicates += 1
            return []
        if is_first:  # no longer in the publisher's buffer, and no snapshot either
            items: list[StreamItem] = []
            if sequence > (expected or 0):
                items.append(self._lose(expected or 0, sequence - 1))
                # What came live from before it is lost, too: it might be of a life before.
                self._replayed.pass_to(sequence)
            return items + self._hand_on(sequence, payload, True)
        # A hole inside an answer: what came live may fill it. If not, it was dropped on the way, or is a
        # number that was never sent; the next answer tells.
        items = self._fill_from_held(sequence)
        if self._expected == sequence:
            return items + self._hand_on(sequence, payload, True)
        return items + self._ask(now, is_overlapping=False)

    def take_replay_end(self, now: float) -> list[StreamItem]:
        """The answer to `request` is complete."""
        request = self.request
        if request is None:
            return []
        self._note_life(now)
        self.request = None
        if request.is_healing:  # the publisher has nothing to give
            self._healing.end()
            return []
        if self.is_incomplete:
            self._healing.due_s = now  # requests are answered again
        is_empty = request.num_replies == 0 and self._expected is not None
        if is_empty and (request.is_overlapping or self._is_doubtful):
            # A publisher keeps at least its newest batch. This one never sent what we took last.
            return [self._begin_new_life(), *self._ask(now)]
        self._num_fruitless += 1  # until something is handed on
        return self._follow_held(now)

    def take_time(self, now: float) -> list[StreamItem]:
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
            if self.can_replay:
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
        if request.is_probe and not self._held:
            self._num_fruitless = 0
            return [self._fall_silent(now)]
        self._healing.plan(now)
        if self._is_doubtful and self._expected is not None:
            # Nobody says that this is the same life, so nothing of it may be relied upon.
            items = [self._begin_new_life()]
            self._num_fruitless = self.max_attempts
            return items + self._follow_held(now)
        return self._follow_held(now)

    def take_connected(self, now: float) -> list[StreamItem]:
        """The live connection is there, or there again. Call it before taking what comes over it.

        Other than the first time there may be a new life at the other end: until an answer has shown the last
        batch again, or said that it is gone, what comes live waits. What waited before is forgotten, as is a
        request under way: it may be of the old life, and the next answer has it if it is not.
        """
        if not self.can_replay:
            return []
        self._is_doubtful = self._was_connected
        self._was_connected = True
        self._num_fruitless = 0
        self._held.clear()
        self._settle_and_ask(now)
        return []

    # ---- inside ----------------------------------------------------------------------------------

    def _follow_held(self, now: float) -> list[StreamItem]:
        items: list[StreamItem] = []
        for _ in range(_FOLLOW_AT_ONCE):
            if not self._held or self.is_recovering:
                break
            sequence, payload = self._held.pop()
            items += self._follow(sequence, payload, now, has_waited=True)
        if not self._held and not self.is_recovering:
            self._num_fruitless = 0
        return items

    def _follow(
        self, sequence: int, payload: bytes, now: float, has_waited: bool = False
    ) -> list[StreamItem]:
        """A live batch, and no request under way; or not any more, if it has waited for the answer."""
        if self._expected is None or sequence >= self._expected:
            return self._hand_on_or_recover(self._expected or 0, sequence, payload, now)
        if has_waited and self._replayed.contradict(sequence, payload):
            self._counts.num_stale += 1  # the publisher, asked later, sent something else under this number
            return []
        is_known = self._replayed.have(sequence, payload)
        self._replayed.note_live(sequence)
        if is_known:
            self._counts.num_duplicates += 1
            return []
        return [self._begin_new_life(), *self._hand_on_or_recover(0, sequence, payload, now)]

    def _hand_on_or_recover(self, first: int, sequence: int, payload: bytes, now: float) -> list[StreamItem]:
        """A live batch when the one that should come is `first`, which is not after it."""
        items: list[StreamItem] = []
        if sequence > first:
            if self.can_replay and self._num_fruitless < min(self.max_attempts, 2):
                self._held.put_back(sequence, payload)
                return self._ask(now)
            items.append(self._lose(first, sequence - 1, is_healed=is_snapshot(payload)))
        items += self._hand_on(sequence, payload, False)
        self._replayed.note_live(sequence)
        self._replayed.forget()
        return items

    def _hand_on(
        self, sequence: int, payload: bytes, is_replayed: bool, is_read_again: bool = False
    ) -> list[StreamItem]:
        self._expected = sequence + 1
        self._last_fingerprint = make_fingerprint(payload)
        self._num_fruitless = 0
        if is_replayed:
            self._replayed.add(sequence, self._last_fingerprint)
        try:
            batch = decode_lazily(payload)
        except EventStreamError:
            self._counts.num_malformed += 1
            return [self._lose(sequence, sequence)]
        self._counts.num_batches += 1
        self._counts.num_replayed += is_replayed
        self._counts.num_dropped_events += batch.num_dropped
        if is_read_again:
            batch = DecodedBatch(batch.ts, [AllBlocksCleared(), *batch.events], batch.data_parallel_rank)
        item = ReceivedBatch(sequence, batch, is_replayed)
        if item.is_reset and not is_read_again:
            self._known_since = 0
        elif self._known_since is None or is_read_again:
            self._known_since = sequence
        if self.is_incomplete and (is_read_again or self._known_since == 0):
            self._counts.num_heals += 1
            self._healing.end()
        return [item]

    def _take_snapshot(self, sequence: int, payload: bytes) -> list[StreamItem]:
        """A batch that stands for everything up to its number, and comes where another should have."""
        items: list[StreamItem] = []
        first = self._expected or 0
        if sequence > first:
            items.append(self._lose(first, sequence - 1, is_healed=True))
        items += self._hand_on(sequence, payload, True)
        self._is_doubtful = False
        self._last_fingerprint = None  # not what the publisher has under this number
        self._replayed.forget(passed=sequence)
        self._counts.num_snapshots += 1
        return items

    def _take_healing_reply(self, request: ReplayRequest, sequence: int, payload: bytes) -> list[StreamItem]:
        """The first batch of an answer to a request that is to make up for an earlier loss.

        If it is of any use, the rest of the answer is read as of any other request, and live batches wait.
        """
        if is_snapshot(payload):
            request.is_healing = False
            return self._take_snapshot(sequence, payload)
        if self._known_since is not None and sequence >= self._known_since:
            self.request = None  # the publisher has nothing older than what was handed on since the loss
            self._healing.end()
            return []
        request.is_healing = False
        self._replayed.forget(passed=sequence)
        return self._hand_on(sequence, payload, True, is_read_again=True)

    def _pass_filled(self, item: StreamItem, payload: bytes) -> None:
        """Note that live batches of this number are in a snapshot: it has it, or fills those behind.

        A publisher sends a snapshot under the number that was asked for, then empty batches up to the last
        batch that is in it.
        """
        if isinstance(item, ReceivedBatch):
            is_filled = self._replayed.passed == item.sequence - 1 and not item.batch.events
            if is_filled or is_snapshot(payload):
                self._replayed.pass_to(item.sequence)

    def _fill_from_held(self, end: int) -> list[StreamItem]:
        """Hand on what came live and is next, up to `end`, not included."""
        items: list[StreamItem] = []
        while self._held and self._expected is not None:
            sequence, payload = self._held.first
            if sequence > self._expected or sequence >= end:
                break
            if sequence == self._expected:
                items += self._hand_on(sequence, payload, False)
            elif not self._replayed.have(sequence, payload):
                break
            self._held.pop()
            self._replayed.note_live(sequence)
        return items

    def _begin_new_life(self) -> StreamItem:
        self._expected = None
        self._last_fingerprint = None
        self._is_doubtful = False
        self._replayed.begin_new_life()
        self._num_fruitless = 0
        self._known_since = None
        self._counts.num_restarts += 1
        return PublisherRestarted()

    def _lose(self, first: int, last: int, is_healed: bool = False) -> StreamItem:
        if is_healed:
            self._counts.num_skipped += last - first + 1
        else:
            self._counts.num_lost += last - first + 1
            self._known_since = None
        return BatchesLost(first, last, is_healed)

    def _ask(self, now: float, is_overlapping: bool = True, is_probe: bool = False) -> list[StreamItem]:
        """Ask for what should come next, beginning with the last batch that was taken if overlapping."""
        is_overlapping = is_overlapping and bool(self._expected) and self._last_fingerprint is not None
        start = min((self._expected or 0) - is_overlapping, MAX_SEQUENCE)
        self._settled_at = None
        self.request = ReplayRequest(start, is_overlapping, now + self.replay_timeout_s, is_probe)
        self._counts.num_requests += 1
        return []

    def _ask_to_heal(self, now: float) -> None:
        """Ask for everything that the publisher has."""
        self._healing.plan(now)
        self.request = ReplayRequest(0, False, now + self.replay_timeout_s, is_healing=True)
        self._counts.num_requests += 1

    def _settle_and_ask(self, now: float) -> None:
        if self._settle_s is None:
            self._ask(now)
            return
        self.request = None
        self._settled_at = now + self._settle_s

    def _note_life(self, now: float) -> None:
        self._last_life = now
        self.is_silent = False

    def _fall_silent(self, now: float) -> StreamItem:
        self.is_silent = True
        self._counts.num_silences += 1
        return PublisherSilent(now - self._last_life)
