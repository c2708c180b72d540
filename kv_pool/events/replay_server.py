"""`ReplayServer`: answers readers that missed batches, on a thread of its own."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from kv_pool.errors import EventStreamError
from kv_pool.events.batch import KVEventBatch
from kv_pool.events.replay_buffer import ReplayBuffer, SentBatch
from kv_pool.events.sequence_frames import make_end_frames, make_replay_frames, unpack_sequence
from kv_pool.events.snapshot import Snapshot, encode_snapshot
from kv_pool.events.zmq_module import zmq

MAX_UNREAD_ANSWERS = 2
"""Per reader. The ROUTER's high-water mark has room for as many, and snapshots can be large."""

_STOP, _SNAPSHOT = b"stop", b"snapshot"

_logger = logging.getLogger(__name__)


class ReplayServer:
    """Answers each request with the batches from the wanted one on and an end marker.

    ```text
    wanted sequence                answer
    still in the buffer            the batches from there to the newest, end
    yet to come                    end
    gone, or a hole, no state      whatever is left after it, end
    gone, or a hole, with state    one batch, number n: clear, everything resident; then n + 1 to newest, end
    ```

    A reader that does not read holds up nobody: sending never waits, and who has two answers unread is not
    sent a third, so that what is kept for it is bounded.

    Args:
        socket: a ROUTER, used and in the end closed by the server's thread.
        request_snapshot: called on the server's thread when `waiting` has got an entry; `deliver` has to
            follow. None without a state.

    Attributes:
        waiting: readers and the sequence they want, for whom the publisher's thread is to take a snapshot.
        num_replays, num_snapshots, num_abandoned, num_malformed, num_events_failed: as in
            `PublisherStatistics`.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        socket: "zmq.SyncSocket",
        buffer: ReplayBuffer,
        topic: bytes,
        rank: int,
        encode: Callable[[KVEventBatch], bytes],
        request_snapshot: Callable[[], None] | None,
    ) -> None:
        self.waiting: deque[tuple[bytes, int]] = deque()
        self.num_replays = 0
        self.num_snapshots = 0
        self.num_abandoned = 0
        self.num_malformed = 0
        self.num_events_failed = 0
        self._socket = socket
        self._buffer = buffer
        self._topic = topic
        self._rank = rank
        self._encode = encode
        self._request_snapshot = request_snapshot
        self._delivered: deque[Snapshot] = deque()
        self._unread: dict[bytes, list[zmq.MessageTracker]] = {}
        # With a threshold of 0 ZeroMQ tells when it has let go of a message, however small.
        socket.copy_threshold = 0
        # The publisher's thread wakes this one through a pair of sockets: it waits for sockets anyway.
        address = f"inproc://kv_pool-replay-{id(self)}"
        self._wake_sender: zmq.SyncSocket = context.socket(zmq.PAIR)
        self._wake_receiver: zmq.SyncSocket = context.socket(zmq.PAIR)
        self._wake_sender.bind(address)
        self._wake_receiver.connect(address)
        self._thread = threading.Thread(target=self._run, name="kv_pool event replay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def deliver(self, snapshot: Snapshot) -> None:
        """Answer those who wait for it. From the thread that calls `stop`, too."""
        self._delivered.append(snapshot)
        self._wake_sender.send(_SNAPSHOT)

    def stop(self) -> None:
        """End the thread after the answer it is at; its socket is closed."""
        self._wake_sender.send(_STOP)
        self._thread.join()
        self._wake_sender.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        while True:
            try:
                ready = dict(poller.poll())
                if self._wake_receiver in ready:
                    if self._wake_receiver.recv() == _STOP:
                        break
                    self._answer_with_snapshot(self._delivered.popleft())
                if self._socket in ready:
                    self._answer_request(self._socket.recv_multipart())
            except Exception:
                # Whatever one reader does, the others are served.
                _logger.exception("a replay request was not answered")
                self.num_abandoned += 1
        self._wake_receiver.close(linger=0)
        self._socket.close()

    def _answer_request(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 3 or frames[1]:
                raise EventStreamError(
                    f"a replay request has {len(frames)} frames, not identity, empty, start"
                )
            start = unpack_sequence(frames[2])
        except EventStreamError as error:
            self.num_malformed += 1
            _logger.debug("ignored: %s", error)
            return
        identity = frames[0]
        if self._has_unread_answers(identity):
            self.num_abandoned += 1
            return
        if self._request_snapshot is not None and not self._buffer.has_all_from(start):
            self.waiting.append((identity, start))
            self._request_snapshot()
            return
        self._send(identity, self._buffer.list_from(start))

    def _answer_with_snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.chunks is None:
            for identity, start in snapshot.waiting:
                self._send(identity, self._buffer.list_from(start))
            return
        payload, num_left_out = encode_snapshot(snapshot.ts, snapshot.chunks, self._rank, self._encode)
        self.num_events_failed += num_left_out
        for identity, _ in snapshot.waiting:
            if self._has_unread_answers(identity):
                self.num_abandoned += 1
                continue
            batches = [(snapshot.sequence, payload), *self._buffer.list_from(snapshot.sequence + 1)]
            if self._send(identity, batches):
                self.num_snapshots += 1

    def _send(self, identity: bytes, batches: list[SentBatch]) -> bool:
        """Send an answer, end marker included; False if the reader was gone or had no room for it."""
        try:
            for sequence, payload in batches:
                self._socket.send_multipart(
                    make_replay_frames(identity, self._topic, sequence, payload), zmq.DONTWAIT, copy=False
                )
            tracker = self._socket.send_multipart(
                make_end_frames(identity), zmq.DONTWAIT, copy=False, track=True
            )
        except zmq.Again:
            _logger.warning("a reader does not read the replay it asked for; the rest of it was left out")
        except zmq.ZMQError as error:
            _logger.debug("a reader that asked for a replay is gone: %s", error)
        else:
            if tracker is not None:
                self._unread.setdefault(identity, []).append(tracker)
            self.num_replays += 1
            return True
        self.num_abandoned += 1
        return False

    def _has_unread_answers(self, identity: bytes) -> bool:
        """Has this reader as many answers coming as it may have?"""
        # Readers come and go, under a new identity each time: forget the ones that have read everything.
        for reader, trackers in list(self._unread.items()):
            trackers[:] = [tracker for tracker in trackers if not tracker.done]
            if not trackers:
                del self._unread[reader]
        return len(self._unread.get(identity, ())) >= MAX_UNREAD_ANSWERS
