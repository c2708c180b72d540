"""`ZMQEventPublisher`: a pool's events, over ZeroMQ, as vLLM 0.33 publishes them."""

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

from kv_pool.core.kv_events import AllBlocksCleared, KVCacheEvent
from kv_pool.errors import PublisherClosedError
from kv_pool.events.batch import KVEventBatch, encode_batch, encode_batch_positional
from kv_pool.events.config import PublisherConfig
from kv_pool.events.endpoints import is_loopback
from kv_pool.events.event_filter import list_others
from kv_pool.events.event_publisher import PublisherStatistics
from kv_pool.events.live_backlog import LiveBacklog
from kv_pool.events.rare_warnings import is_worth_logging
from kv_pool.events.replay_buffer import ReplayBuffer
from kv_pool.events.replay_server import ReplayServer
from kv_pool.events.resident_state import ResidentState
from kv_pool.events.sequence_frames import pack_sequence
from kv_pool.events.sockets import PublisherSockets
from kv_pool.threads import start_thread

_logger = logging.getLogger(__name__)


_Published = tuple[int, float, list[KVCacheEvent]]
"""A batch on its way to the publisher's thread: how many were published before it, dropped ones included;
when; its events. A plain tuple, since the pool's thread makes it."""

MAX_SENT_TOGETHER = 8
"""Batches that wait for each other; the first of them for less than a millisecond."""

_CLOSE = None
"""Stands in the queue behind the last batch."""


class ZMQEventPublisher:
    """Sends a pool's events to subscribers, and the batches they missed to those who ask.

        with ZMQEventPublisher(PublisherConfig(replay_endpoint="tcp://127.0.0.1:5657")) as publisher:
            ...
            publisher.publish(pool.take_events())   # after each step

    ```text
    pool's thread       publish() --> queue of max_queue_size batches
    publisher's thread  queue --> state.apply --> encode --> PUB socket, replay buffer
    replay thread       replay buffer, state.iter_snapshot --> ROUTER socket
    ```

    What is lost on the way does not pass unnoticed: a batch that was dropped, or could not be encoded, leaves
    a hole in the sequence. A state that has missed a batch begins anew: the next one starts with
    `AllBlocksCleared`, and readers know too few blocks for a while instead of wrong ones for good.

    Args:
        config: see `PublisherConfig`.
        state: changes what is sent, and knows what is resident; the publisher's alone from now on. None:
            events are sent as they are, and a replay request that is too old gets what is left, as in vLLM.
        clock: seconds since the epoch, for the time in batches.
        monotonic: seconds, for heartbeats, for readers that are too slow, and for the end.

    Attributes:
        endpoint, replay_endpoint: with the real port in place of 0.

    Raises:
        EndpointError: an endpoint in use, or one that cannot be bound or connected to.
        InvalidArgumentError: a key file that can not be used.
        MissingDependencyError: when this module is imported without pyzmq.
        OutOfThreadsError: the system starts no more threads. The endpoints are free again.
    """

    def __init__(
        self,
        config: PublisherConfig,
        state: ResidentState | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._state = state
        self._clock = clock
        self._monotonic = monotonic
        self._encode = encode_batch_positional if config.positional else encode_batch
        self._topic = config.topic.encode()

        self._publishing = threading.Lock()
        self._closing = threading.Lock()
        self._queue: SimpleQueue[_Published | None] = SimpleQueue()
        self._max_queue_size = config.max_queue_size
        self._next_number = 0
        self._is_closed = False
        self._give_up_s = float("inf")

        first_sequence = config.choose_first_sequence(clock)
        self._first_sequence = first_sequence
        self._expected_number = 0
        self._must_clear = False
        self._buffer = ReplayBuffer(config.buffer_steps, first_sequence)
        if state is not None:
            state.apply([], first_sequence - 1)

        self._num_batches_sent = 0
        self._num_events_sent = 0
        self._num_bytes_sent = 0
        self._num_empty_batches_sent = 0
        self._num_batches_dropped = 0
        self._num_events_dropped = 0
        self._num_batches_failed = 0
        self._num_events_failed = 0

        self._sockets = PublisherSockets(config)
        self._backlog = LiveBacklog(self._sockets, config.max_unread_bytes, monotonic)
        self.endpoint: str | None = self._sockets.endpoint
        self.replay_endpoint = self._sockets.replay_endpoint
        self._replay_server: ReplayServer | None = None
        if self._sockets.replay is not None:
            self._replay_server = ReplayServer(
                self._sockets.context,
                self._sockets.replay,
                self._sockets.connections,
                self._buffer,
                state,
                config,
                self._encode,
                clock,
                monotonic,
            )
        if config.curve_secret_key_file is None and not (
            is_loopback(config.endpoint) and is_loopback(config.replay_endpoint or config.endpoint)
        ):
            _logger.warning(
                "whoever reaches %s can read the token ids of all prompts; CURVE keys prevent it",
                " or ".join(filter(None, (self.endpoint, self.replay_endpoint))),
            )
        try:
            self._sockets.connections.start()
            if self._replay_server is not None:
                self._replay_server.start()
            self._thread = start_thread("kv_pool event publisher", self._run)
        except BaseException:
            self._close_sockets()
            self._sockets.end()
            raise

    # ---- the pool's thread ---------------------------------------------------------------------------

    def publish(self, events: list[KVCacheEvent]) -> None:
        """Hand over the events of one scheduler step, as one batch; they belong to the publisher now.

        No events, no batch. Never waits for a socket, an encoder or a reader. Any thread may call it; what
        one thread publishes is sent in its order.

        Raises:
            PublisherClosedError: after `close()`.
        Cost: O(1), whatever is in the list.
        """
        if not events:
            return
        # `with` takes twice as long here; benchmarks/bench_event_stream.py
        self._publishing.acquire()
        try:
            if self._is_closed:
                raise PublisherClosedError("events came after close(); they are not sent")
            number = self._next_number
            self._next_number = number + 1
            if self._queue.qsize() < self._max_queue_size or self._make_room(events):
                self._queue.put((number, self._clock(), events))
        finally:
            self._publishing.release()

    def _make_room(self, events: list[KVCacheEvent]) -> bool:
        """Drop the oldest batch, or say that these events are to be dropped; count it either way."""
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
        self._num_batches_dropped += 1
        self._num_events_dropped += _count(events)
        if is_worth_logging(self._num_batches_dropped):
            _logger.warning(
                "%d batches of events dropped so far, %d wait to be sent; a larger max_queue_size holds more",
                self._num_batches_dropped,
                self._queue.qsize(),
            )

    # ---- from outside --------------------------------------------------------------------------------

    def statistics(self) -> PublisherStatistics:
        """The numbers so far; a batch under way may be in some of them and not in others yet."""
        server = self._replay_server
        last_sequence = self._buffer.last_sequence
        return PublisherStatistics(
            num_batches_sent=self._num_batches_sent,
            num_events_sent=self._num_events_sent,
            num_bytes_sent=self._num_bytes_sent,
            num_empty_batches_sent=self._num_empty_batches_sent,
            num_batches_dropped=self._num_batches_dropped,
            num_events_dropped=self._num_events_dropped,
            num_batches_failed=self._num_batches_failed,
            num_events_failed=self._num_events_failed + (server.num_events_failed if server else 0),
            num_replays=server.num_replays if server else 0,
            num_snapshots=server.num_snapshots if server else 0,
            num_replays_abandoned=server.num_abandoned if server else 0,
            num_malformed_requests=server.num_malformed if server else 0,
            num_readers_dropped=self._backlog.num_dropped + (server.num_readers_dropped if server else 0),
            num_readers_refused=self._sockets.connections.num_refused,
            num_readers=len(self._sockets.connections),
            num_queued=self._queue.qsize(),
            last_sequence=last_sequence if last_sequence >= self._first_sequence else None,
        )

    def close(self) -> None:
        """Send what was published so far, wait for it to leave, and stop. Does nothing the second time.

        Takes up to `linger_s` for what is queued here and as long again for what ZeroMQ holds for subscribers
        that are behind; what is left then is dropped, the first part of it counted.
        """
        with self._closing:
            if self._is_closed:
                return
            with self._publishing:
                self._is_closed = True
                self._give_up_s = self._monotonic() + self.config.linger_s
                self._queue.put(_CLOSE)
            self._thread.join()
            self._sockets.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- the publisher's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        heartbeat_s = self.config.heartbeat_s or float("inf")
        sent_s = self._monotonic()
        while True:
            left_s = max(0.0, sent_s + heartbeat_s - self._monotonic())
            wait_s = min(left_s, self._backlog.look_again_s)
            try:
                published = self._queue.get(timeout=wait_s if wait_s < float("inf") else None)
            except Empty:
                self._backlog.free()
                if wait_s < left_s:
                    continue
                self._skip_to(self._find_next_number())
                beat: list[tuple[int, bytes]] = []
                self._prepare(self._clock(), [], beat)
                self._send(beat)
                sent_s = self._monotonic()
                continue
            # What is queued is prepared first and sent together: ZeroMQ's thread is woken once for all of it.
            ready: list[tuple[int, bytes]] = []
            while published is not None:
                number, ts, events = published
                if self._monotonic() >= self._give_up_s:
                    self._count_dropped(events)
                else:
                    self._skip_to(number)
                    self._expected_number = number + 1
                    self._prepare(ts, events, ready)
                if len(ready) == MAX_SENT_TOGETHER:
                    break
                try:
                    published = self._queue.get_nowait()
                except Empty:
                    break
            self._send(ready)
            sent_s = self._monotonic()
            if published is _CLOSE:
                break
        self._close_sockets()

    def _close_sockets(self) -> None:
        if self._replay_server is not None:
            self._replay_server.stop()
        self._sockets.connections.stop()
        self._sockets.live.close()

    def _find_next_number(self) -> int:
        """Of the batch that comes next: behind the dropped ones if no other is queued."""
        with self._publishing:
            return self._next_number if self._queue.empty() else self._expected_number

    def _skip_to(self, number: int) -> None:
        """Leave a hole in place of the batches before this one that were dropped."""
        num_dropped = number - self._expected_number
        if num_dropped:
            self._buffer.leave_hole(self._buffer.last_sequence + num_dropped)
            self._must_clear = True
        self._expected_number = number

    def _prepare(self, ts: float, events: list[KVCacheEvent], ready: list[tuple[int, bytes]]) -> None:
        """Append one batch to those that are to be sent, or leave a hole in its place. Never raises."""
        sequence = self._buffer.last_sequence + 1
        try:
            if self._state is not None:
                events = self._apply(self._state, events, sequence)
            else:
                self._add_kinds(events)
            payload = self._encode(KVEventBatch(ts, events, self.config.data_parallel_rank))
        except Exception:
            # One bad event must not end the stream: this batch is a hole, the next one is sent.
            self._buffer.leave_hole(sequence)
            self._count_failed(1, _count(events))
            return
        # Kept before it is sent: a reader that has seen a batch live can ask for it.
        self._buffer.append(sequence, payload)
        ready.append((sequence, payload))
        self._num_events_sent += len(events)
        self._num_empty_batches_sent += not events

    def _count_failed(self, num_batches: int, num_events: int) -> None:
        self._num_batches_failed += num_batches
        self._num_events_failed += num_events
        if is_worth_logging(self._num_batches_failed):
            _logger.exception("%d batches of events could not be sent so far", self._num_batches_failed)

    def _apply(self, state: ResidentState, events: list[KVCacheEvent], sequence: int) -> list[KVCacheEvent]:
        """What to send for these events: with kinds, and as the state wants it.

        The batch is sent even when that is nothing: a snapshot taken from now on says that it has it.
        """
        if self._must_clear:
            events = [AllBlocksCleared(), *events]
        try:
            self._add_kinds(events)
            sent = state.apply(events, sequence, packs_tokens=True)
        except Exception:
            self._must_clear = True
            state.apply([], sequence)
            raise
        self._must_clear = False
        return sent

    def _add_kinds(self, events: list[KVCacheEvent]) -> None:
        for event in list_others(events):
            self._add_kind(event)

    def _add_kind(self, event: Any) -> None:
        # By attribute and not by class: connectors bring classes of their own.
        group_id = getattr(event, "group_idx", None)
        if group_id is None or getattr(event, "kv_cache_spec_kind", "") is not None:
            return
        groups = self.config.groups
        if 0 <= group_id < len(groups):
            event.kv_cache_spec_kind = groups[group_id].kind
            event.kv_cache_spec_sliding_window = groups[group_id].sliding_window
        else:
            event.kv_cache_spec_kind = "unknown"

    def _send(self, ready: list[tuple[int, bytes]]) -> None:
        """Send batches that are in the replay buffer already. Never raises."""
        for sequence, payload in ready:
            try:
                self._backlog.send(self._topic, pack_sequence(sequence), payload)
            except Exception:
                self._count_failed(1, 0)
                continue
            self._num_batches_sent += 1
            self._num_bytes_sent += len(payload)


def _count(events: Any) -> int:
    """How many events there are; what is no list, and not to be published, counts as one."""
    return len(events) if isinstance(events, list) else 1
