"""`ReplayServer`: keeps the last batches, and answers replay requests on a thread of its own."""

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import itemgetter
from socket import socketpair
from typing import Any

from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.errors import EventStreamError
from kv_pool.events.batch import (
    END_OF_REPLAY,
    SEQUENCE_BYTES,
    KVEventBatch,
    encode_batch,
    encode_in_pieces,
    pack_sequence,
    unpack_sequence,
)
from kv_pool.events.event_publisher import PublisherConfig, PublisherStatistics, is_worth_logging
from kv_pool.events.sockets import REPLAY_HWM, report_failure, zmq
from kv_pool.events.stream_state import StreamState
from kv_pool.loggers import get_logger
from kv_pool.threads import YieldTimer, start_thread

MAX_FILLED = 200_000
"""Maximum number of sequences that a snapshot and the empty batches after it fill."""

MAX_ANSWERS = 32
"""Maximum number of readers served at the same time; others wait."""

REQUESTS_AT_ONCE = 16
"""Maximum number of requests received between two rounds of replies."""

TRACKED_BYTES = 2**16
"""Replies of at least this size are tracked until they are read."""

LOOK_AGAIN_MS = 20
"""Polling interval while readers are served, since ZeroMQ does not report every read."""

END_POSITION = 3
"""Index of the end marker's only non-empty frame, counted from the identity."""

COPY_BYTES = 1024
"""Shorter frames are copied into ZeroMQ rather than shared with it."""

MAX_WAITING_REQUESTS = 8
"""Maximum number of queued requests of one reader."""

LEAST_BYTES_PER_S = 1_000_000
"""A reader that reads as fast as this is never dropped."""

_logger = get_logger(__name__)


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

    def skip(self, sequence: int) -> None:
        """Leave a hole up to this sequence, higher than all others: the batches there are never sent."""
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


@dataclass(slots=True)
class Reply:
    """One message to a reader.

    Attributes:
        frames: without the reader's identity.
        is_tracked: whether ZeroMQ reports when it has released the message, at some cost.
        is_snapshot, is_end: whether it is a snapshot or the end marker rather than a batch.
        tracker: of a tracked reply that was sent; done when ZeroMQ has released the message.
    """

    frames: list[bytes]
    is_tracked: bool = False
    is_snapshot: bool = False
    is_end: bool = False
    tracker: Any = None

    @property
    def payload(self) -> bytes:
        return self.frames[-1]


@dataclass(slots=True)
class ReplayReader:
    """The replay server's state for one reader, from its first request until it has read all answers.

    Attributes:
        progress_s: the last time at which it read a reply or had none to read.
        starts: the start sequences of queued requests.
        answer: the rest of the current answer; None between two answers.
        next_reply: the reply that could not be sent yet.
        unread: tracked replies that were sent but not read, oldest first.
    """

    identity: bytes
    progress_s: float
    starts: deque[int] = field(default_factory=deque)
    answer: Iterator[Reply | None] | None = None
    next_reply: Reply | None = None
    unread: deque[Reply] = field(default_factory=deque)

    def note_progress(self, now: float) -> None:
        """Remove the replies that were read."""
        while self.unread and self.unread[0].tracker.done:
            self.unread.popleft()
            self.progress_s = now

    def is_waiting(self) -> bool:
        """Return True if it has a request that is not answered completely."""
        return self.answer is not None or bool(self.starts)

    @property
    def is_done(self) -> bool:
        """Whether all its requests are answered, and all tracked replies read."""
        return not self.is_waiting() and not self.unread

    def count_unread(self) -> int:
        """Return the size of its unread tracked replies, in bytes."""
        return sum(len(unread.payload) for unread in self.unread)


class ReplayServer:
    """A server that answers each request with the batches from the requested one on, and an end marker.

    ```text
    requested sequence            answer
    in the buffer                 the batches from there to the newest, end
    in the future                 end
    dropped or a hole, no state   the remaining batches after it, end
    dropped or a hole, state      a snapshot (a clear, all resident blocks) under the requested number, empty
                                  batches up to the last one it includes, the batches after it, end
    the same, and more than       a snapshot under the number of the last batch it includes, the batches
    MAX_FILLED numbers to fill    after it, end
    ```

    With a state an answer has no gap after its first batch: Dynamo's indexer would apply the batches after
    a gap without requesting the missing ones, and strict readers reject them. If the buffer does not continue
    the answer, a snapshot does; if one was sent already, the answer ends, and the reader requests the rest
    when it sees a gap live.

    All readers together use a bounded amount of memory. `MAX_ANSWERS` of them are served at the same time.
    For each, ZeroMQ holds at most `REPLAY_HWM` replies, and of tracked replies an equal share of
    `max_unread_bytes`; replies are created only when they can be sent. The answers to a reader that reads
    nothing for `slow_reader_s` end without an end marker; the kernel closes its connection meanwhile.

    Args:
        socket: a ROUTER, used and finally closed by the server's thread.
        first_sequence: that of the first batch.
        counts: what the server does is counted there.
        clock: time in the batches of snapshots, in seconds since the epoch.

    Attributes:
        buffer: the last batches, to which the publisher appends.
        num_events_left_out: events of snapshots that cannot be encoded.

    Raises:
        EndpointError: the system has no file descriptors for the server. The socket is closed.
        OutOfThreadsError: the system starts no more threads. The socket is closed.
    """

    def __init__(
        self,
        socket: "zmq.SyncSocket",
        config: PublisherConfig,
        state: StreamState | None,
        first_sequence: int,
        counts: PublisherStatistics,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self.num_events_left_out = 0
        self.buffer = ReplayBuffer(config.buffer_steps, first_sequence)
        self._socket = socket
        self._config = config
        self._state = state
        self._counts = counts
        self._clock = clock
        self._monotonic = monotonic
        self._topic = config.topic.encode()
        self._readers: dict[bytes, ReplayReader] = {}
        self._snapshot: SentBatch | None = None
        self._is_stopping = False
        socket.copy_threshold = COPY_BYTES
        # The thread polls sockets, so a socket is needed to wake it.
        with report_failure(str(config.rank_replay_endpoint)), ExitStack() as on_failure:
            on_failure.callback(socket.close)
            self._wake_reader, self._wake_writer = map(on_failure.enter_context, socketpair())
            self._thread = start_thread("kv_pool event replay", self._run)
            on_failure.pop_all()

    def stop(self) -> None:
        """Stop the thread after the current reply or piece of a snapshot, and close the socket."""
        self._is_stopping = True
        self._wake_writer.send(b"x")
        self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        # The descriptor also becomes readable when a reader has read replies.
        poller.register(self._socket.FD, zmq.POLLIN)
        poller.register(self._wake_reader.fileno(), zmq.POLLIN)
        try:
            while not self._is_stopping:
                poller.poll(LOOK_AGAIN_MS if self._readers else None)
                is_busy = True
                while is_busy and not self._is_stopping:
                    is_busy = self._receive_requests() | self._serve_readers()
                if not self._readers:
                    self._snapshot = None
        except zmq.ContextTerminated:
            _logger.warning("the ZeroMQ context was terminated before the publisher was closed")
        self._socket.close()

    # ---- requests ------------------------------------------------------------------------------------

    def _receive_requests(self) -> bool:
        """Receive some of the pending requests; return False if there was none."""
        for num_received in range(REQUESTS_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return num_received > 0
            if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:  # identity, empty, start
                self._counts.num_malformed_requests += 1
                _logger.debug("ignored a malformed replay request of %d frames", len(frames))
                continue
            self._note_request(frames[0], unpack_sequence(frames[2]))
        return True

    def _note_request(self, identity: bytes, start: int) -> None:
        reader = self._readers.get(identity)
        if reader is None:
            if len(self._readers) >= self._config.max_readers:
                self._abandon(f"{len(self._readers)} readers wait for replays")
                return
            reader = self._readers[identity] = ReplayReader(identity, self._monotonic())
        if len(reader.starts) >= MAX_WAITING_REQUESTS:
            self._abandon("a reader sends requests without reading the answers")
            return
        reader.starts.append(start)

    def _abandon(self, reason: str) -> None:
        self._counts.num_replays_abandoned += 1
        number = self._counts.num_replays_abandoned
        if is_worth_logging(number):
            _logger.warning("%d replays skipped or cut short so far: %s", number, reason)

    # ---- replies -------------------------------------------------------------------------------------

    def _serve_readers(self) -> bool:
        """Send a few replies to each of the first readers, and end the answers to those that do not read.

        Returns False if no reply could be sent.
        """
        is_busy = False
        num_served = 0
        now = self._monotonic()
        for reader in list(self._readers.values()):
            if self._is_stopping:
                break
            reader.note_progress(now)
            try:
                if reader.is_waiting() and num_served < MAX_ANSWERS:
                    num_served += 1
                    is_busy |= self._serve(reader, now)
                self._end_if_slow(reader, now)
            except zmq.ZMQError as error:
                self._abandon(f"the reader is gone: {error}")
                del self._readers[reader.identity]
            except Exception:
                # A failure for one reader must not stop the service for the others.
                _logger.exception("a replay request failed")
                self._abandon("it failed")
                del self._readers[reader.identity]
            else:
                if reader.is_done:
                    del self._readers[reader.identity]
        return is_busy

    def _serve(self, reader: ReplayReader, now: float) -> bool:
        """Send a few replies to a reader. Raises ZMQError if the reader is gone."""
        if reader.answer is None and reader.starts:
            reader.progress_s = now
            reader.answer = self._iter_answer(reader, reader.starts.popleft())
        for num_sent in range(REPLAY_HWM):
            if reader.next_reply is None and reader.answer is not None:
                reader.next_reply = next(reader.answer)
            if reader.next_reply is None or not self._try_to_send(reader, reader.next_reply, now):
                return num_sent > 0
            reader.next_reply = None
        return True

    def _try_to_send(self, reader: ReplayReader, reply: Reply, now: float) -> bool:
        """Send a reply; return False if the reader has too many unread ones."""
        num_bytes = len(reply.payload)
        if reply.is_tracked and not reply.is_end:
            num_unread = reader.count_unread()
            if num_unread and num_unread + num_bytes > self._config.max_unread_bytes // MAX_ANSWERS:
                return False
        frames: list[Any] = [reader.identity, *reply.frames]
        if reply.is_tracked:
            # Share even a short frame with ZeroMQ, so that it reports when it has released it.
            position = END_POSITION if reply.is_end else -1
            frames[position] = zmq.Frame(frames[position], track=True, copy=False)
            reply.tracker = frames[position].tracker
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=not reply.is_tracked)
        except zmq.Again:
            return False
        reader.progress_s = now
        if reply.is_tracked:
            reader.unread.append(reply)
        self._counts.num_snapshots += reply.is_snapshot
        if reply.is_end:
            self._counts.num_replays += 1
            reader.answer = None
        return True

    def _end_if_slow(self, reader: ReplayReader, now: float) -> None:
        """End the answer to a reader that does not read, so that others are served in its place."""
        allowed_s = self._config.slow_reader_s + reader.count_unread() / LEAST_BYTES_PER_S
        if reader.answer is not None and now >= reader.progress_s + allowed_s:
            # Unread replies still count.
            reader.answer = reader.next_reply = None
            reader.starts.clear()
            self._counts.num_readers_dropped += 1
            self._abandon(f"a reader read nothing for {now - reader.progress_s:.1f} s")

    # ---- answers -------------------------------------------------------------------------------------

    def _iter_answer(self, reader: ReplayReader, start: int) -> Iterator[Reply | None]:
        """Yield the replies to one request, created on demand; None while a snapshot has to wait."""
        number, last = start, self.buffer.last_sequence
        state = self._state
        leaves_gaps = state is None
        while number <= last:
            batches = self.buffer.list_from(number, REPLAY_HWM)
            if batches and batches[0][0] == number:
                for sequence, payload in batches:
                    if sequence != number or sequence > last:
                        break
                    yield self._make_reply(sequence, payload)
                    number += 1
            elif state is not None:
                while self._must_wait_for_snapshot(reader):
                    yield None
                snapshot = self._take_snapshot(state, number)
                state = None  # one snapshot per answer
                if snapshot is None:
                    leaves_gaps = True
                    continue
                end = max(number, snapshot[0])
                first = number if end - number < MAX_FILLED else end
                yield self._make_reply(first, snapshot[1], is_snapshot=True)
                yield from self._iter_empty(first + 1, end)
                number, last = end + 1, max(last, self.buffer.last_sequence)
            elif batches and leaves_gaps:
                number = batches[0][0]
            else:
                break
        yield Reply([b"", b"", END_OF_REPLAY, b""], is_tracked=True, is_end=True)

    def _make_reply(self, sequence: int, payload: bytes, is_snapshot: bool = False) -> Reply:
        frames = [b"", self._topic, pack_sequence(sequence), payload]
        return Reply(frames, is_snapshot or len(payload) >= TRACKED_BYTES, is_snapshot)

    def _iter_empty(self, first: int, last: int) -> Iterator[Reply]:
        """Yield empty batches with these sequences, for readers that require every sequence."""
        payload = encode_batch(KVEventBatch(self._clock(), [], self._config.data_parallel_rank))
        yield_timer = YieldTimer()
        for sequence in range(first, last + 1):
            yield_timer.yield_if_due()
            yield self._make_reply(sequence, payload)

    # ---- snapshots -----------------------------------------------------------------------------------

    def _must_wait_for_snapshot(self, reader: ReplayReader) -> bool:
        """Return True while this reader has an unread snapshot, or all readers have too many unread bytes."""
        if any(unread.is_snapshot for unread in reader.unread):
            return True
        payloads = {
            id(unread.payload): unread.payload
            for one in self._readers.values()
            for unread in one.unread
            if unread.is_snapshot
        }
        if sum(map(len, payloads.values())) < self._config.max_unread_bytes:
            return False
        reader.progress_s = self._monotonic()  # the wait is not this reader's fault
        return True

    def _take_snapshot(self, state: StreamState, number: int) -> SentBatch | None:
        """Return a batch with all resident blocks; the previous one if the buffer continues from it.

        None if the state raises an error: readers then get the batches in the buffer.
        """
        snapshot = self._snapshot
        if snapshot is None or snapshot[0] < number or not self.buffer.has_all_from(snapshot[0] + 1):
            self._snapshot = None
            ts = self._clock()
            try:
                sequence, chunks = state.iter_snapshot()
                chunks = self._until_stopping(chunks)
                payload, num_left_out = encode_in_pieces(
                    ts, chunks, self._config.data_parallel_rank, self._config.positional
                )
            except Exception:
                _logger.exception("taking a snapshot failed")
                return None
            self.num_events_left_out += num_left_out
            self._snapshot = sequence, payload
        return self._snapshot

    def _until_stopping(self, chunks: Iterator[list[KVCacheEvent]]) -> Iterator[list[KVCacheEvent]]:
        for chunk in chunks:
            if self._is_stopping:
                raise EventStreamError("the publisher was closed while taking a snapshot")
            yield chunk
