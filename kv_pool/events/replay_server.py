"""`ReplayServer`: answers readers that missed batches, on a thread of its own."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.errors import EventStreamError
from kv_pool.events.batch import KVEventBatch
from kv_pool.events.replay_buffer import ReplayBuffer, SentBatch
from kv_pool.events.resident_state import ResidentState
from kv_pool.events.sequence_frames import make_end_frames, make_replay_frames, unpack_sequence
from kv_pool.events.snapshot_batch import encode_in_pieces
from kv_pool.events.zmq_module import zmq

LOOK_AGAIN_MS = 20
"""Until the next look whether a reader has read its snapshot; ZeroMQ tells with some delay."""

COPY_BYTES = 1024
"""What is shorter is copied into ZeroMQ rather than shared with it."""

_logger = logging.getLogger(__name__)


class ReplayServer:
    """Answers each request with the batches from the wanted one on, and an end marker.

    ```text
    wanted sequence               answer
    still in the buffer           the batches from there to the newest, end
    yet to come                   end
    gone, or a hole, no state     whatever is left after it, end
    gone, or a hole, with state   one batch, number n: clear, everything resident; then n + 1 to newest, end
    ```

    A reader that does not read holds up nobody, and costs a bounded amount of memory: sending never waits;
    what the socket has no room for is not sent; a second snapshot is sent when the first has been read.

    When more batches than the buffer holds pass while a snapshot is taken, the answer ends with it: what
    comes live goes on from there, or shows a gap, and the reader asks again. A gap inside the answer would be
    for good: Dynamo's indexer applies what stands behind it, and does not ask for what is missing.

    Args:
        socket: a ROUTER, used and in the end closed by the server's thread.
        encode: of the batches in snapshots.
        clock: for their time, seconds since the epoch.

    Attributes:
        num_replays, num_snapshots, num_abandoned, num_malformed, num_events_failed: as in
            `PublisherStatistics`.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        socket: "zmq.SyncSocket",
        buffer: ReplayBuffer,
        state: ResidentState | None,
        topic: bytes,
        rank: int,
        encode: Callable[[KVEventBatch], bytes],
        clock: Callable[[], float],
    ) -> None:
        self.num_replays = 0
        self.num_snapshots = 0
        self.num_abandoned = 0
        self.num_malformed = 0
        self.num_events_failed = 0
        self._socket = socket
        self._buffer = buffer
        self._state = state
        self._topic = topic
        self._rank = rank
        self._encode = encode
        self._clock = clock
        self._snapshot: SentBatch | None = None
        self._unread_snapshots: dict[bytes, zmq.MessageTracker] = {}
        self._deferred: dict[bytes, int] = {}
        self._is_stopping = False
        socket.copy_threshold = COPY_BYTES
        # The thread waits for sockets, so it is woken by one.
        address = f"inproc://kv_pool-replay-{id(self)}"
        self._wake_sender: zmq.SyncSocket = context.socket(zmq.PAIR)
        self._wake_receiver: zmq.SyncSocket = context.socket(zmq.PAIR)
        self._wake_sender.bind(address)
        self._wake_receiver.connect(address)
        self._thread = threading.Thread(target=self._run, name="kv_pool event replay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the batch it is sending, or the piece of a snapshot; its socket is closed."""
        self._is_stopping = True
        # Nobody is there any more if the thread has seen it by now; to wait for one would be for ever.
        with suppress(zmq.Again):
            self._wake_sender.send(b"", zmq.DONTWAIT)
        self._thread.join()
        self._wake_sender.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        try:
            while not self._is_stopping:
                poller.poll(LOOK_AGAIN_MS if self._deferred else None)
                self._answer_requests()
        except zmq.ContextTerminated:
            _logger.warning("the ZeroMQ context was terminated before the publisher was closed")
        self._wake_receiver.close(linger=0)
        self._socket.close()

    def _answer_requests(self) -> None:
        """Answer those that are there. Readers that come together, after a restart, share one snapshot."""
        deferred, self._deferred = self._deferred, {}
        for identity, start in deferred.items():
            self._try_to_answer(identity, start)
        while not self._is_stopping:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            try:
                if len(frames) != 3 or frames[1]:
                    raise EventStreamError(
                        f"a replay request has {len(frames)} frames, not identity, empty, start"
                    )
                start = unpack_sequence(frames[2])
            except EventStreamError as error:
                self.num_malformed += 1
                _logger.debug("a malformed request was ignored: %s", error)
                continue
            self._try_to_answer(frames[0], start)
        self._snapshot = None

    def _try_to_answer(self, identity: bytes, start: int) -> None:
        try:
            self._answer(identity, start)
        except zmq.ZMQError as error:
            self.num_abandoned += 1
            _logger.warning("a reader did not get all of a replay: it is gone, or does not read: %s", error)
        except Exception:
            # Whatever goes wrong for one reader, the others are served.
            self.num_abandoned += 1
            _logger.exception("a replay request was not answered")

    def _answer(self, identity: bytes, start: int) -> None:
        """Send an answer, end marker included. Raises ZMQError if the reader is gone, or full."""
        snapshot = None
        # Listed before it is looked at: batches go from the buffer meanwhile.
        batches = self._buffer.list_from(start)
        is_there = batches[0][0] == start if batches else start > self._buffer.last_sequence
        if self._state is not None and not is_there:
            if self._has_unread_snapshot(identity):
                self._defer(identity, start)
                return
            snapshot = self._take_snapshot(self._state)
        if snapshot is not None:
            sequence, payload = snapshot
            frames = make_replay_frames(identity, self._topic, sequence, payload)
            # Not copied, so that readers share it, and ZeroMQ says when it has let go of it.
            tracker = self._send(frames, is_shared=True)
            if tracker is not None:
                self._unread_snapshots[identity] = tracker
            batches = self._buffer.list_from(sequence + 1)
            if batches and batches[0][0] != sequence + 1:
                batches = []
            self.num_snapshots += 1
        for sequence, payload in batches:
            frames = make_replay_frames(identity, self._topic, sequence, payload)
            self._send(frames)
        self._send(make_end_frames(identity))
        self.num_replays += 1

    def _send(self, frames: list[bytes], is_shared: bool = False) -> "zmq.MessageTracker | None":
        """Send if there is room now. A shared message can be tracked: done when ZeroMQ has let go of it."""
        try:
            return self._socket.send_multipart(frames, zmq.DONTWAIT, copy=not is_shared, track=is_shared)
        except zmq.Again:
            # ZeroMQ looks about once a millisecond how much has been read; when asked for events, at once.
            self._socket.getsockopt(zmq.EVENTS)
            return self._socket.send_multipart(frames, zmq.DONTWAIT, copy=not is_shared, track=is_shared)

    def _defer(self, identity: bytes, start: int) -> None:
        if identity in self._deferred:
            self.num_abandoned += 1
            _logger.warning("a reader asks for snapshots and does not read them; this request is left out")
        else:
            self._deferred[identity] = start

    def _take_snapshot(self, state: ResidentState) -> SentBatch | None:
        """One batch with all that is resident; the one before if the stream goes on from there, too.

        None if the state cannot tell: readers get what the buffer has then.
        """
        if self._snapshot is None or not self._buffer.has_all_from(self._snapshot[0] + 1):
            self._snapshot = None
            ts = self._clock()
            try:
                sequence, chunks = state.iter_snapshot()
                chunks = self._until_stopping(chunks)
                payload, num_left_out = encode_in_pieces(ts, chunks, self._rank, self._encode)
            except Exception:
                _logger.exception("no snapshot could be taken")
                return None
            self.num_events_failed += num_left_out
            self._snapshot = sequence, payload
        return self._snapshot

    def _until_stopping(self, chunks: Iterator[list[KVCacheEvent]]) -> Iterator[list[KVCacheEvent]]:
        for chunk in chunks:
            if self._is_stopping:
                raise EventStreamError("the publisher was closed while a snapshot was taken")
            yield chunk

    def _has_unread_snapshot(self, identity: bytes) -> bool:
        """Has ZeroMQ yet to get rid of the last snapshot for this reader?"""
        # Readers come and go, under a new identity each time: forget those who have read theirs.
        for reader, tracker in list(self._unread_snapshots.items()):
            if tracker.done:
                del self._unread_snapshots[reader]
        return identity in self._unread_snapshots
