"""`ZMQEventPublisher`: publishes a pool's events over ZeroMQ, in the format of vLLM 0.33."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from kv_pool.closing import Closing
from kv_pool.core.kv_events import AllBlocksCleared, KVCacheEvent
from kv_pool.core.stored_events import add_kinds
from kv_pool.errors import PublisherClosedError
from kv_pool.events.batch import KVEventBatch, encode_batch, encode_batch_positional, pack_sequence
from kv_pool.events.config import PublisherConfig
from kv_pool.events.event_publisher import PublisherStatistics, ReplayBuffer, is_worth_logging
from kv_pool.events.replay_server import ReplayServer
from kv_pool.events.sockets import PublisherSockets
from kv_pool.events.stream_state import StreamState
from kv_pool.events.zmq_module import zmq
from kv_pool.threads import start_thread

_logger = logging.getLogger(__name__)


_Published = tuple[int, float, list[KVCacheEvent]]
"""A queued batch: its sequence, its time, its events. A plain tuple, since the pool's thread creates it."""

MAX_SENT_TOGETHER = 8
"""Batches that are encoded before they are sent together; the first waits for less than a millisecond."""

_MORE = int(zmq.SNDMORE)  # combining enum members takes longer than combining ints

_CLOSE = None
"""The end of the queue, put after the last batch."""


class ZMQEventPublisher(Closing):
    """A ZeroMQ publisher of a pool's events; replays missed batches on request.

        with ZMQEventPublisher(PublisherConfig(replay_endpoint="tcp://127.0.0.1:5657")) as publisher:
            ...
            publisher.publish(pool.take_events())   # after each step

    ```text
    pool's thread       publish() --> queue of max_queue_size batches
    publisher's thread  queue --> state.apply --> encode --> replay buffer, PUB socket
    replay thread       replay buffer, state.iter_snapshot --> ROUTER socket
    ```

    Readers notice every loss: a batch that was dropped or could not be encoded leaves a hole in the sequence.
    If the state missed a batch, the next one starts with `AllBlocksCleared`: readers then know too few blocks
    for a while, but never wrong ones.

    Args:
        config: see `PublisherConfig`.
        state: filters the events and tracks resident blocks; owned by the publisher from now on. None sends
            events unchanged, and answers a replay request that is too old from the buffer, as vLLM does.
        clock: seconds since the epoch, for the time in batches.
        monotonic: seconds, for slow replays and `close()`.

    Attributes:
        endpoint, replay_endpoint: with the actual port instead of 0.

    Raises:
        EndpointError: an endpoint that is in use, or cannot be bound or connected to.
        InvalidArgumentError: a key file that cannot be used.
        MissingDependencyError: when this module is imported without pyzmq.
        OutOfThreadsError: the system starts no more threads. The endpoints are free again.
    """

    def __init__(
        self,
        config: PublisherConfig,
        state: StreamState | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._state = state
        self._clock = clock
        self._monotonic = monotonic
        self._encode = encode_batch_positional if config.positional else encode_batch
        self._labels = [(group.kind, group.sliding_window) for group in config.groups]
        self._topic = config.topic.encode()

        self._publishing = threading.Lock()
        self._closing = threading.Lock()
        self._queue: SimpleQueue[_Published | None] = SimpleQueue()
        self._max_queue_size = config.max_queue_size
        self._is_closed = False
        self._linger_deadline_s = float("inf")

        first_sequence = config.find_first_sequence(clock)
        self._first_sequence = first_sequence
        self._next_sequence = first_sequence
        self._last_filtered = first_sequence - 1
        self._buffer = ReplayBuffer(config.buffer_steps, first_sequence)
        if state is not None:
            state.apply([], first_sequence - 1)
        self._counts = PublisherStatistics()
        self._sockets = PublisherSockets(config)
        self.endpoint: str | None = self._sockets.endpoint
        self.replay_endpoint = self._sockets.replay_endpoint
        self._replay_server: ReplayServer | None = None
        with ExitStack() as on_failure:
            on_failure.callback(self._sockets.end)
            on_failure.callback(self._close_sockets)
            if self._sockets.replay is not None:
                self._replay_server = ReplayServer(
                    self._sockets.replay,
                    self._buffer,
                    state,
                    config,
                    self._encode,
                    clock,
                    monotonic,
                    self._counts,
                )
            self._thread = start_thread("kv_pool event publisher", self._run)
            on_failure.pop_all()

    # ---- the pool's thread ---------------------------------------------------------------------------

    def publish(self, events: list[KVCacheEvent]) -> None:
        """Publish the events of one scheduler step as one batch. The publisher takes ownership of the list.

        An empty list is not sent. Never waits for a socket, an encoder or a reader. May be called from any
        thread; the batches of one thread are sent in order.

        Raises:
            PublisherClosedError: after `close()`.
        Cost: O(1), independent of the number of events.
        """
        if not events and not self._is_closed:
            return
        # `with` takes twice as long here; benchmarks/bench_event_stream.py
        self._publishing.acquire()
        try:
            if self._is_closed:
                raise PublisherClosedError("publish() was called after close(); the events are not sent")
            sequence = self._next_sequence
            self._next_sequence = sequence + 1
            if self._queue.qsize() < self._max_queue_size or self._make_room(events):
                self._queue.put((sequence, self._clock(), events))
        finally:
            self._publishing.release()

    def _make_room(self, events: list[KVCacheEvent]) -> bool:
        """Drop and count the oldest batch; or count these events as dropped and return False."""
        if self.config.when_full == "drop_newest":
            self._count_dropped(events)
            return False
        try:
            oldest = self._queue.get_nowait()
        except Empty:
            return True
        if oldest is not _CLOSE:
            self._count_dropped(oldest[2])
        return True

    def _count_dropped(self, events: list[KVCacheEvent]) -> None:
        counts = self._counts
        counts.num_batches_dropped += 1
        counts.num_events_dropped += _count(events)
        if is_worth_logging(counts.num_batches_dropped):
            _logger.warning(
                "%d batches of events dropped so far, %d are queued; raise max_queue_size to queue more",
                counts.num_batches_dropped,
                self._queue.qsize(),
            )

    # ---- any thread ----------------------------------------------------------------------------------

    def get_statistics(self) -> PublisherStatistics:
        """Return the counters; a batch that is being sent may be in only some of them."""
        server = self._replay_server
        last_sequence = self._buffer.last_sequence
        return replace(
            self._counts,
            num_events_failed=self._counts.num_events_failed + (server.num_events_left_out if server else 0),
            num_queued=self._queue.qsize(),
            last_sequence=last_sequence if last_sequence >= self._first_sequence else None,
        )

    def close(self) -> None:
        """Send the batches published so far, and stop. Idempotent.

        Waits up to `linger_s` for the queue, and as long again for the batches that ZeroMQ holds for slow
        subscribers. The rest is dropped; batches dropped from the queue are counted.
        """
        with self._closing:
            if self._is_closed:
                return
            with self._publishing:
                self._is_closed = True
                self._linger_deadline_s = self._monotonic() + self.config.linger_s
                self._queue.put(_CLOSE)
            self._thread.join()
            self._sockets.end()

    # ---- the publisher's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        heartbeat_s = self.config.heartbeat_s and min(self.config.heartbeat_s, threading.TIMEOUT_MAX)
        while True:
            published: _Published | None
            try:
                published = self._queue.get(timeout=heartbeat_s)
            except Empty:
                with self._publishing:
                    if not self._queue.empty():
                        continue
                    published = (self._next_sequence, self._clock(), [])  # a heartbeat
                    self._next_sequence += 1
            # Prepare all queued batches, then send them together: this wakes ZeroMQ's thread only once.
            ready: list[tuple[int, bytes]] = []
            while published is not None:
                sequence, ts, events = published
                if self._monotonic() >= self._linger_deadline_s:
                    self._count_dropped(events)
                else:
                    self._prepare(sequence, ts, events, ready)
                if len(ready) == MAX_SENT_TOGETHER:
                    break
                try:
                    published = self._queue.get_nowait()
                except Empty:
                    break
            self._send(ready)
            if published is _CLOSE:
                break
        self._close_sockets()

    def _close_sockets(self) -> None:
        if self._replay_server is not None:
            self._replay_server.stop()
        self._sockets.live.close()

    def _prepare(
        self, sequence: int, ts: float, events: list[KVCacheEvent], ready: list[tuple[int, bytes]]
    ) -> None:
        """Encode a batch and append it to `ready`; on failure leave a hole in the sequence. Never raises.

        With a state the batch is sent even if no event is left: snapshots from now on include its sequence.
        """
        state = self._state
        try:
            sent = events
            if state is not None and sequence != self._last_filtered + 1:
                sent = [AllBlocksCleared(), *events]  # the state missed a batch: it was dropped, or failed
            add_kinds(sent, self._labels, "unknown")
            if state is not None:
                sent = state.apply(sent, sequence, packs_tokens=True)
            payload = self._encode(KVEventBatch(ts, sent, self.config.data_parallel_rank))
            self._last_filtered = sequence
        except Exception:
            # One bad event must not end the stream: this batch becomes a hole, the next one is sent.
            if state is not None and state.last_sequence != sequence:
                state.apply([], sequence)  # snapshots include its number, so that readers get the next one
            self._buffer.leave_hole(sequence)
            self._count_failed(_count(events))
            return
        # Buffer the batch before sending it: a reader that has seen a batch live can request it.
        self._buffer.append(sequence, payload)
        ready.append((sequence, payload))
        self._counts.num_events_sent += len(sent)
        self._counts.num_empty_batches_sent += not sent

    def _count_failed(self, num_events: int) -> None:
        counts = self._counts
        counts.num_batches_failed += 1
        counts.num_events_failed += num_events
        if is_worth_logging(counts.num_batches_failed):
            _logger.exception("%d batches of events failed so far", counts.num_batches_failed)

    def _send(self, ready: list[tuple[int, bytes]]) -> None:
        """Send batches that are already in the replay buffer. Never raises."""
        send = self._sockets.live.send  # send_multipart takes three times as long
        for sequence, payload in ready:
            try:
                number = pack_sequence(sequence)  # first: a message that is begun has to be ended
                send(self._topic, _MORE)
                send(number, _MORE)
                send(payload)
            except Exception:
                self._count_failed(0)
                continue
            self._counts.num_batches_sent += 1
            self._counts.num_bytes_sent += len(payload)


def _count(events: Any) -> int:
    """Return the number of events; an invalid argument without a length counts as one."""
    try:
        return len(events)
    except TypeError:
        return 1
