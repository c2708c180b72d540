"""`KVEventSubscriber`: reads a publisher's event stream; missed batches are requested or reported as lost."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from kv_pool.closing import Closing
from kv_pool.errors import EventStreamError, InvalidArgumentError
from kv_pool.events.batch import END_OF_REPLAY, SEQUENCE_BYTES, read_rank, unpack_sequence
from kv_pool.events.continuity import Continuity
from kv_pool.events.curve_keys import CurveKeys
from kv_pool.events.endpoints import check_endpoint
from kv_pool.events.sockets import zmq
from kv_pool.events.stream_items import (
    BatchRequest,
    PublisherRestarted,
    StreamCounts,
    StreamItem,
    StreamSource,
    sum_counts,
)
from kv_pool.events.subscriber_sockets import SubscriberSockets

DEFAULT_MAX_MESSAGE_BYTES = 128 * 2**20
"""A snapshot of 100,000 blocks of 128 tokens has about 70 MB."""

MAX_PUBLISHERS = 4096
"""Bound on the publishers of one subscriber: each takes about 3 kB."""

MAX_RESTARTS_PER_CONNECTION = 2
"""A publisher that restarts connects again; more restarts under one topic and rank show two publishers."""


@dataclass(frozen=True, slots=True)
class SubscriberStatistics:
    """The counters and the state of a subscriber.

    Attributes:
        counts: the counters of the stream, of all publishers together.
        next_sequence: sequence of the next batch; None if it is unknown, or with several publishers.
        is_recovering: whether missed batches are being requested; live batches are queued meanwhile.
        is_incomplete: whether batches may be missing because requests were unanswered; requests will be
            repeated.
        is_silent: see `PublisherSilent`.
        num_queued: live batches queued until the answer is complete.
        num_connections: number of times that the live connection was established.
        is_connected: a publisher is connected now; with several, the last of them that came or went.
        num_unreadable: messages with invalid frames, or of more than `MAX_PUBLISHERS` publishers.
        publishers: the publishers that have sent messages.
    """

    counts: StreamCounts
    next_sequence: int | None
    is_recovering: bool
    is_incomplete: bool
    is_silent: bool
    num_queued: int
    num_connections: int
    num_unreadable: int
    is_connected: bool = False
    publishers: tuple[StreamSource, ...] = ()


class KVEventSubscriber(Closing):
    """An iterator over a publisher's batches, for `for item in subscriber` and `async for`.

        with KVEventSubscriber("tcp://host:5557", "tcp://host:5657") as subscriber:
            for item in subscriber:
                match item:
                    case ReceivedBatch(sequence, batch): ...
                    case BatchesLost(first, last, is_healed): ...
                    case PublisherRestarted() | PublisherSilent(): ...

    Missed batches are requested and returned in order, whether they were sent before the start, dropped by
    a full queue, or sent while disconnected. Batches that are no longer available are reported as lost (see
    `Continuity`). Without a replay endpoint each gap is a loss, and a restart is noticed only if the sequence
    decreases. Works with publishers of kv_pool and of vLLM.

    Several publishers may connect to a subscriber that binds: each topic, and each rank under it, is a stream
    with its own sequence, named by the items' `source`. Behind a proxy only topics are told apart.

    Args:
        endpoint: the publisher's PUB socket; ZeroMQ retries the connection until it exists.
        replay_endpoint: the publisher's ROUTER socket; None for no replay.
        topic: receive only batches whose topic has this prefix.
        binds: bind `endpoint` instead of connecting, for publishers that connect, as llm-d's do.
        replay_timeout_s, max_attempts, silence_after_s, max_queued, max_queued_bytes: see `Continuity`.
        hwm: number of live batches that ZeroMQ queues between iterations; more are dropped and requested
            later.
        max_message_bytes: maximum size of a frame. After a larger one the subscriber disconnects from the
            publisher and reconnects: a live batch is requested again, a larger snapshot is never received.
        curve: keys, for a publisher that encrypts.
        context: a ZeroMQ context, needed for inproc endpoints; None for a new one.
        clock: a monotonic clock, in seconds.

    Raises:
        EndpointError: an endpoint that cannot be connected to or bound. Nothing is left open. While
            iterating: no file descriptors for a request, which a later iteration sends again.
        InvalidArgumentError: an invalid endpoint or key. Nothing is left open.
        EventStreamError: while iterating, two publishers send under the same topic and rank, or a second one
            sends although there is a replay endpoint, which is of one publisher.

    One thread or task iterates at a time; `close` may be called from any.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        binds: bool = False,
        replay_timeout_s: float = 5.0,
        max_attempts: int = 3,
        silence_after_s: float | None = None,
        max_queued: int = 10_000,
        max_queued_bytes: int = 64 * 2**20,
        hwm: int = 100_000,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        curve: CurveKeys | None = None,
        context: "zmq.Context[Any] | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_endpoint(endpoint)
        if replay_endpoint is not None:
            check_endpoint(replay_endpoint)
        for name, bound in (
            ("max_attempts", max_attempts),
            ("max_queued", max_queued),
            ("max_queued_bytes", max_queued_bytes),
            ("max_message_bytes", max_message_bytes),
        ):
            if bound < 1:  # ZeroMQ would treat 0 as no bound
                raise InvalidArgumentError(f"{name} is {bound}; it must be at least 1")
        self.replay_endpoint = replay_endpoint
        self._clock = clock
        self._binds = binds
        self._silence_after_s = silence_after_s
        self._machine = Continuity(
            replay_endpoint is not None,
            clock(),
            replay_timeout_s,
            max_attempts,
            silence_after_s,
            max_queued,
            max_queued_bytes,
        )
        # The streams by topic and rank. The first publisher is the one that `_machine` requests batches of.
        self._machines: dict[tuple[bytes, int | None], Continuity] = {}
        # Restarts since the last connection.
        self._num_restarts: dict[StreamSource, int] = {}
        self._ready: deque[StreamItem] = deque()
        self._asked: BatchRequest | None = None
        self._num_connections = 0
        self._num_unreadable = 0
        # `close` from another thread or task wakes a waiting iteration, which then closes the sockets.
        self._lock = threading.Lock()
        self._is_iterating = False
        self._is_closing = False
        self._sockets = SubscriberSockets(
            endpoint, topic, binds, hwm, max_message_bytes, curve, context, clock
        )
        self.endpoint = self._sockets.endpoint
        with ExitStack() as on_failure:
            on_failure.callback(self._sockets.close)
            self._send_request()
            on_failure.pop_all()

    # ---- iterating -------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamItem:
        if not self._begin_iterating():
            raise StopIteration
        try:
            while not self._ready:
                self._wait_and_read(self._find_wait_s())
                if self._is_closing:
                    raise StopIteration
            return self._ready.popleft()
        finally:
            self._end_iterating()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamItem:
        if not self._begin_iterating():
            raise StopAsyncIteration
        try:
            while not self._ready:
                if not self._read():
                    await self._sockets.wait_async(self._find_wait_s())
                if self._is_closing:
                    raise StopAsyncIteration
            return self._ready.popleft()
        finally:
            self._end_iterating()

    def poll(self, timeout_s: float = 0.0) -> list[StreamItem]:
        """Return the available items in order, after waiting up to `timeout_s` for the first; [] if none."""
        if not self._begin_iterating():
            return []
        try:
            deadline = self._clock() + timeout_s
            while not self._ready and not self._is_closing:
                left_s = max(0.0, deadline - self._clock())
                wait_s = self._find_wait_s()
                self._wait_and_read(left_s if wait_s is None else min(wait_s, left_s))
                if self._clock() >= deadline:
                    break
            items = list(self._ready)
            self._ready.clear()
            return items
        finally:
            self._end_iterating()

    def get_statistics(self) -> SubscriberStatistics:
        """Return the counters and the state. May be called from any thread."""
        machine = self._machine
        machines = self._list_machines()
        return SubscriberStatistics(
            counts=sum_counts(one.get_counts() for one in machines),
            next_sequence=machine.expected if len(machines) == 1 else None,
            is_recovering=machine.is_recovering,
            is_incomplete=machine.is_incomplete,
            is_silent=all(one.is_silent for one in machines),
            num_queued=machine.num_queued,
            num_connections=self._num_connections,
            num_unreadable=self._num_unreadable,
            is_connected=self._sockets.is_connected,
            publishers=tuple(one.source for one in list(self._machines.values())),
        )

    def close(self) -> None:
        """Stop a running iteration and close the sockets. Idempotent."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            if self._is_iterating:
                self._sockets.wake()
                return
        self._sockets.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _begin_iterating(self) -> bool:
        with self._lock:
            if self._is_closing:
                return False
            if self._is_iterating:
                raise InvalidArgumentError("another thread or task is iterating over this subscriber")
            self._is_iterating = True
            return True

    def _end_iterating(self) -> None:
        with self._lock:
            self._is_iterating = False
            is_closing = self._is_closing
        if is_closing:
            self._sockets.close()

    def _find_wait_s(self) -> float | None:
        if self._machine.has_ready:
            return 0.0
        deadlines = [one.deadline for one in self._list_machines()]
        times = [one for one in (*deadlines, self._sockets.reconnecting.due_s) if one is not None]
        return max(0.0, min(times) - self._clock()) if times else None

    def _wait_and_read(self, wait_s: float | None) -> None:
        if not self._read():
            self._sockets.wait(wait_s)
            self._read()

    def _read(self) -> bool:
        """Handle some of the messages that have arrived, without waiting; False if there was none."""
        if self._machine.has_ready:
            self._take(self._machine.take_queued(self._clock()))
            return True
        messages, num_connections, has_any = self._sockets.read()
        # Before the messages: those from a new connection may be from a new incarnation.
        for _ in range(num_connections):
            self._num_connections += 1
            self._num_restarts.clear()
            self._take(self._machine.handle_connection(self._clock()))
        for message in messages:
            self._take_live(message)
        asked = self._asked
        replies = self._sockets.read_replies()
        for reply in replies:
            if self._asked is not asked:
                break  # an earlier reply ended the request; these answer it, too
            self._take_reply(reply)
        self._sockets.reconnect_if_due()
        for machine in self._list_machines():
            self._take(machine.handle_timers(self._clock()))
        return has_any or bool(replies) or bool(self._ready)

    def _take(self, items: list[StreamItem]) -> None:
        self._ready.extend(items)
        if self._machine.request is not self._asked:
            self._send_request()

    def _take_live(self, frames: list[bytes]) -> None:
        machine = None
        # The payload is empty if the publisher could not send it.
        if len(frames) == 3 and len(frames[1]) == SEQUENCE_BYTES and frames[1] != END_OF_REPLAY and frames[2]:
            machine = self._find_machine(frames[0], frames[2])
        if machine is None:
            self._num_unreadable += 1
            return
        items = machine.handle_live(unpack_sequence(frames[1]), frames[2], self._clock())
        self._take(items)
        if self._binds and any(isinstance(item, PublisherRestarted) for item in items):
            self._check_restarts(machine.source)

    def _list_machines(self) -> list[Continuity]:
        return [*self._machines.values()] or [self._machine]

    def _find_machine(self, topic: bytes, payload: bytes) -> Continuity | None:
        """Return the stream of a live message, a new one for another publisher; None beyond the bound."""
        key = (topic, read_rank(payload) if self._binds else None)
        machine = self._machines.get(key)
        if machine is not None or len(self._machines) >= MAX_PUBLISHERS:
            return machine
        machine = self._machine
        source = name_source(topic, None if self.replay_endpoint is not None else key[1])
        if self._machines:
            if self.replay_endpoint is not None:
                raise EventStreamError(
                    f"{self.endpoint}: a second publisher (topic {source.topic!r}, rank {key[1]}) sends "
                    f"beside topic {machine.source.topic!r}; the replay endpoint {self.replay_endpoint} is "
                    "that of one publisher. Leave it out, or subscribe to one topic"
                )
            machine = Continuity(False, self._clock(), silence_after_s=self._silence_after_s)
        machine.source = source
        self._machines[key] = machine
        return machine

    def _check_restarts(self, source: StreamSource) -> None:
        """Raise EventStreamError for restarts without connections: two publishers take turns."""
        number = self._num_restarts.get(source, 0) + 1
        self._num_restarts[source] = number
        if number > MAX_RESTARTS_PER_CONNECTION:
            raise EventStreamError(
                f"{self.endpoint}: two publishers send under topic {source.topic!r} and rank {source.rank}; "
                "their numbers contradict each other. Give each a topic or a data-parallel rank"
            )

    def _take_reply(self, frames: list[bytes]) -> None:
        now = self._clock()
        # Since vLLM 0.26 replies include the topic.
        if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != SEQUENCE_BYTES:
            self._num_unreadable += 1
        elif frames[-2] == END_OF_REPLAY:
            self._take(self._machine.handle_replay_end(now))
        else:
            if len(frames) == 4 and not self._machines:
                self._machine.source = name_source(frames[1])
            self._take(self._machine.handle_replayed(unpack_sequence(frames[-2]), frames[-1], now))

    def _send_request(self) -> None:
        """Send the machine's current request, replacing the previous one."""
        request = self._machine.request
        self._asked = request
        self._sockets.ask(self.replay_endpoint, None if request is None else request.start)


def name_source(topic: bytes, rank: int | None = None) -> StreamSource:
    """Return the publisher of messages with this topic."""
    return StreamSource(topic.decode(errors="backslashreplace"), rank)
