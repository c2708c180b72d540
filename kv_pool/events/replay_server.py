"""`ReplayServer`: answers readers that missed batches, on a thread of its own."""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.errors import EventStreamError
from kv_pool.events.batch import KVEventBatch
from kv_pool.events.replay_buffer import ReplayBuffer, SentBatch
from kv_pool.events.resident_state import ResidentState
from kv_pool.events.sequence_frames import make_end_frames, make_replay_frames, unpack_sequence
from kv_pool.events.snapshot_batch import encode_in_pieces
from kv_pool.events.zmq_module import zmq

MAX_UNREAD_ANSWERS = 2
"""Per reader. The ROUTER's high-water mark has room for as many, and snapshots can be large."""

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

    A reader that does not read holds up nobody: sending never waits, and who has two answers unread is not
    sent a third, so that what is kept for it is bounded.

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
        self._unread: dict[bytes, list[zmq.MessageTracker]] = {}
        self._is_stopping = False
        # With a threshold of 0 ZeroMQ tells when it has let go of a message, however small.
        socket.copy_threshold = 0
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
        self._wake_sender.send(b"")
        self._thread.join()
        self._wake_sender.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        try:
            while not self._is_stopping:
                poller.poll()
                self._answer_requests()
        except zmq.ContextTerminated:
            _logger.warning("the ZeroMQ context was terminated before the publisher was closed")
        self._wake_receiver.close(linger=0)
        self._socket.close()

    def _answer_requests(self) -> None:
        """Answer those that are there. Readers that come together, after a restart, share one snapshot."""
        while not self._is_stopping:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            try:
                self._answer(frames)
            except Exception:
                # Whatever goes wrong for one reader, the others are served.
                self.num_abandoned += 1
                _logger.exception("a replay request was not answered")
        self._snapshot = None

    def _answer(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 3 or frames[1]:
                raise EventStreamError(
                    f"a replay request has {len(frames)} frames, not identity, empty, start"
                )
            start = unpack_sequence(frames[2])
        except EventStreamError as error:
            self.num_malformed += 1
            _logger.debug("a malformed request was ignored: %s", error)
            return
        identity = frames[0]
        if self._has_unread_answers(identity):
            self.num_abandoned += 1
            _logger.warning("a reader asks for replays and does not read them; this one is left out")
            return
        if self._state is None or self._buffer.has_all_from(start):
            self._send(identity, self._buffer.list_from(start))
            return
        snapshot = self._take_snapshot(self._state)
        if self._send(identity, [snapshot, *self._buffer.list_from(snapshot[0] + 1)]):
            self.num_snapshots += 1

    def _take_snapshot(self, state: ResidentState) -> SentBatch:
        """One batch with all that is resident; the one before if the stream goes on from there, too."""
        if self._snapshot is None or not self._buffer.has_all_from(self._snapshot[0] + 1):
            ts = self._clock()
            sequence, chunks = state.iter_snapshot()
            payload, num_left_out = encode_in_pieces(
                ts, self._until_stopping(chunks), self._rank, self._encode
            )
            self.num_events_failed += num_left_out
            self._snapshot = sequence, payload
        return self._snapshot

    def _until_stopping(self, chunks: Iterator[list[KVCacheEvent]]) -> Iterator[list[KVCacheEvent]]:
        for chunk in chunks:
            if self._is_stopping:
                raise EventStreamError("the publisher was closed while a snapshot was taken")
            yield chunk

    def _send(self, identity: bytes, batches: list[SentBatch]) -> bool:
        """Send an answer, end marker included; False if the reader was gone or had no room for it."""
        try:
            for sequence, payload in batches:
                frames = make_replay_frames(identity, self._topic, sequence, payload)
                self._socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
            tracker = self._socket.send_multipart(
                make_end_frames(identity), zmq.DONTWAIT, copy=False, track=True
            )
        except zmq.ZMQError as error:
            self.num_abandoned += 1
            _logger.warning("a reader did not get all of a replay: it is gone, or does not read: %s", error)
            return False
        if tracker is not None:
            self._unread.setdefault(identity, []).append(tracker)
        self.num_replays += 1
        return True

    def _has_unread_answers(self, identity: bytes) -> bool:
        """Has this reader as many answers coming as it may have?"""
        # Readers come and go, under a new identity each time: forget those who have read everything.
        for reader, trackers in list(self._unread.items()):
            trackers[:] = [tracker for tracker in trackers if not tracker.done]
            if not trackers:
                del self._unread[reader]
        return len(self._unread.get(identity, ())) >= MAX_UNREAD_ANSWERS
