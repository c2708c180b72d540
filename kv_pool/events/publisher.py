"""`ZMQEventPublisher`: publishes a pool's events over ZeroMQ, in the format of vLLM 0.33."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from queue import Empty, SimpleQueue

from kv_pool.closing import Closing
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.stored_events import add_kinds
from kv_pool.errors import PublisherClosedError
from kv_pool.events.batch import KVEventBatch, encode_batch, pack_sequence
from kv_pool.events.event_publisher import PublisherConfig, PublisherStatistics
from kv_pool.events.replay_server import ReplayServer
from kv_pool.events.sockets import PublisherSockets, zmq
from kv_pool.events.stream_state import StreamState
from kv_pool.threads import start_thread

_Published = tuple[int, float, list[KVCacheEvent]]
"""A queued batch: its sequence, its time, its events. A plain tuple, since the pool's thread creates it."""

_Ready = tuple[bytes, bytes, list[KVCacheEvent]]
"""A batch to send: its sequence, packed; its payload; the events in it."""

MAX_SENT_TOGETHER = 8
"""Batches that are encoded before they are sent together; the first waits for less than a millisecond."""

_MORE = int(zmq.SNDMORE)  # combining enum members takes longer than combining ints


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

    Readers notice every loss: batches that were dropped or could not be encoded leave a hole in the sequence.
    The publisher's thread skips it, in the replay buffer and in the state: see `StreamState.skip`.

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
        self._labels = [(group.kind, group.sliding_window) for group in config.groups]
        self._topic = config.topic.encode()

        self._publishing = threading.Lock()
        self._closing = threading.Lock()
        self._queue: SimpleQueue[_Published | None] = SimpleQueue()  # None ends it
        self._max_queue_size = config.max_queue_size
        self._is_closed = False
        self._linger_deadline_s = float("inf")

        self._next_sequence = config.find_first_sequence(clock)
        if state is not None:
            state.last_sequence = self._next_sequence - 1
        self._expected = self._next_sequence  # the next one to send, if the queue drops none
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
                    self._sockets.replay, config, state, self._next_sequence, self._counts, clock, monotonic
                )
            self._thread = start_thread("kv_pool event publisher", self._run)
            on_failure.pop_all()

    # ---- the pool's thread ---------------------------------------------------------------------------

    def publish(self, events: list[KVCacheEvent]) -> None:
        """Publish the events of one scheduler step; see `EventPublisher.publish`."""
        if not events and not self._is_closed:
            return
        # `with` takes twice as long here; benchmarks/bench_event_stream.py
        self._publishing.acquire()
        try:
            if self._is_closed:
                raise PublisherClosedError("publish() was called after close(); the events are not sent")
            ts = self._clock()
            sequence = self._next_sequence
            self._next_sequence = sequence + 1
            if self._queue.qsize() < self._max_queue_size or self._make_room(events):
                self._queue.put((sequence, ts, events))
        finally:
            self._publishing.release()

    def _make_room(self, events: list[KVCacheEvent]) -> bool:
        """Drop and count the oldest batch; or count these events as dropped and return False."""
        if self.config.when_full == "drop_newest":
            self._counts.count_dropped(events, self._queue.qsize())
            return False
        try:
            oldest = self._queue.get_nowait()
        except Empty:  # the publisher's thread has taken them meanwhile
            return True
        assert oldest is not None  # `publish` puts nothing behind the end
        self._counts.count_dropped(oldest[2], self._queue.qsize())
        return True

    # ---- the publisher's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        ready: list[_Ready] = []
        while (published := self._take_next()) is not None:
            prepared = self._prepare(*published)
            if prepared is not None:
                ready.append(prepared)
            # Batches that fail delay no other one. If `_make_room` takes the last queued batch now, it puts
            # another one at once.
            if prepared is None or self._queue.empty() or len(ready) == MAX_SENT_TOGETHER:
                self._send(ready)
        self._send(ready)
        self._close_sockets()

    def _take_next(self) -> _Published | None:
        """Wait for the next batch; after `heartbeat_s` return an empty one. None at the end of the queue."""
        heartbeat_s = self.config.heartbeat_s and min(self.config.heartbeat_s, threading.TIMEOUT_MAX)
        while True:
            try:
                return self._queue.get(timeout=heartbeat_s)
            except Empty:
                with self._publishing:
                    if self._queue.empty():
                        self._next_sequence += 1
                        return self._next_sequence - 1, self._clock(), []

    def _prepare(self, sequence: int, ts: float, events: list[KVCacheEvent]) -> _Ready | None:
        """Encode a batch and buffer it for replays; return None and leave a hole if it fails.

        With a state the batch is sent even if no event is left: snapshots from now on include its sequence.
        """
        if self._monotonic() >= self._linger_deadline_s:
            # The last batch is the one before: a hole would end replays with a snapshot without blocks.
            self._counts.count_dropped(events, self._queue.qsize())
            return None
        if sequence > self._expected:  # the queue has dropped the batches in between
            self._skip(sequence - 1)
        self._expected = sequence + 1
        try:
            add_kinds(events, self._labels, "unknown")
            state = self._state
            sent = events if state is None else state.apply(events, sequence, packs_tokens=True)
            batch = KVEventBatch(ts, sent, self.config.data_parallel_rank)
            payload = encode_batch(batch, self.config.positional)
            number = pack_sequence(sequence)
        except Exception:
            # One bad event must not end the stream: this batch becomes a hole, the next one is sent.
            self._skip(sequence)
            self._counts.count_failed(events)
            return None
        if self._replay_server is not None:
            # Before sending: a reader that has seen a batch live can request it.
            self._replay_server.buffer.append(sequence, payload)
        self._counts.last_sequence = sequence
        return number, payload, sent

    def _send(self, ready: list[_Ready]) -> None:
        """Send these batches and remove them from the list. Never raises.

        Several at once wake ZeroMQ's thread only once.
        """
        send = self._sockets.live.send  # send_multipart takes three times as long
        for number, payload, events in ready:
            try:
                send(self._topic, _MORE)
                send(number, _MORE)
                send(payload)
            except Exception:
                # A PUB socket never waits: memory is short for the payload, or the context is terminated.
                self._counts.count_failed(events)
                with suppress(Exception):
                    send(b"")  # end the message, or the next one would be part of it
            else:
                self._counts.count_sent(events, len(payload))
        ready.clear()

    def _skip(self, sequence: int) -> None:
        """Leave a hole up to this sequence: the batches there were dropped, or have failed."""
        if self._state is not None:
            self._state.skip(sequence)
        if self._replay_server is not None:
            self._replay_server.buffer.skip(sequence)
        self._counts.last_sequence = sequence

    def _close_sockets(self) -> None:
        if self._replay_server is not None:
            self._replay_server.stop()
        self._sockets.live.close()

    # ---- any thread ----------------------------------------------------------------------------------

    def get_statistics(self) -> PublisherStatistics:
        """Return the counters; a batch that is being sent may be in only some of them."""
        server = self._replay_server
        num_left_out = 0 if server is None else server.num_events_left_out
        return replace(
            self._counts,
            num_events_failed=self._counts.num_events_failed + num_left_out,
            num_queued=self._queue.qsize(),
        )

    def close(self) -> None:
        """Send the batches published so far, and stop; see `EventPublisher.close`.

        Waits up to `linger_s` for the queue, and as long again for the batches that ZeroMQ holds for slow
        subscribers. The rest is dropped; batches dropped from the queue are counted.
        """
        with self._closing:
            if self._is_closed:
                return
            with self._publishing:
                self._is_closed = True
                self._linger_deadline_s = self._monotonic() + self.config.linger_s
                self._queue.put(None)
            self._thread.join()
            self._sockets.end()
