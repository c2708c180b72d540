"""`KVEventSubscriber`: a publisher's event stream over ZeroMQ, with what was missed fetched or named."""

import asyncio
import contextlib
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kv_pool.errors import EndpointError, EventStreamError, InvalidArgumentError
from kv_pool.events.continuity import Continuity
from kv_pool.events.curve_keys import CurveKeys
from kv_pool.events.endpoints import check_endpoint, is_ipv6
from kv_pool.events.sequence_frames import END_OF_REPLAY, MAX_SEQUENCE, pack_sequence, unpack_sequence
from kv_pool.events.stream_items import ContinuityCounts, ReplayRequest, StreamItem
from kv_pool.events.zmq_module import zmq

DEFAULT_MAX_MESSAGE_BYTES = 128 * 2**20
"""Larger than a snapshot of 100,000 blocks of 128 tokens each, about 70 MB."""

# What is read from a socket before items are handed on: enough to spread the cost of a turn, little enough
# that decoded batches take little memory.
_READ_AT_ONCE = 16
_READ_BYTES_AT_ONCE = 2**18
_REPLAY_HWM = 1000
_FIRST_RECONNECT_S = 0.2
_MAX_RECONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class SubscriberStatistics:
    """The numbers so far.

    Attributes:
        counts: what happened to the stream.
        next_sequence: of the batch that should come next; None while nothing is known.
        is_recovering: what was missed is being asked for; live batches wait meanwhile.
        is_incomplete: requests were not answered, so batches may be missing; they will be asked for again.
        is_silent: see `PublisherSilent`.
        num_held: live batches that wait for the answer.
        num_connections: times that the live connection was made.
        num_unreadable: messages that are none of the stream's: wrong frames.
    """

    counts: ContinuityCounts
    next_sequence: int | None
    is_recovering: bool
    is_incomplete: bool
    is_silent: bool
    num_held: int
    num_connections: int
    num_unreadable: int


class KVEventSubscriber:
    """Iterates over a publisher's batches, `for item in subscriber` or `async for item in subscriber`.

        with KVEventSubscriber("tcp://host:5557", "tcp://host:5657") as subscriber:
            for item in subscriber:
                match item:
                    case ReceivedBatch(sequence, batch): ...
                    case BatchesLost(first, last, is_healed): ...
                    case PublisherRestarted() | PublisherSilent(): ...

    Whatever was missed - before the start, by a full queue, while the connection was gone - is asked for and
    comes in order; what cannot be had any more is said (see `Continuity`). Without a replay endpoint each gap
    is a loss, and a restart is noticed only if the numbers fall. Publishers of kv_pool with a state and of
    vLLM are both understood.

    Args:
        endpoint: the publisher's PUB socket; connected to again and again until it is there.
        replay_endpoint: its ROUTER socket; None to do without.
        topic: only batches whose topic begins so.
        binds: bind `endpoint` instead, for publishers that connect.
        replay_timeout_s, max_attempts, silence_after_s, max_held, max_held_bytes: see `Continuity`.
        hwm: live batches that ZeroMQ keeps while no one iterates; more are dropped, and asked for later.
        max_message_bytes: size of one frame. A publisher that sends a larger one is disconnected from, and
            connected to again: batches are lost live and asked for, a larger snapshot is never received.
        curve: keys, where the publisher encrypts.
        context: a ZeroMQ context to use, for inproc endpoints; its own if None.
        clock: seconds of any clock that only goes forward.

    Raises:
        EndpointError: an endpoint that cannot be connected to or bound. Nothing is left open.
        InvalidArgumentError: an endpoint or key that can not be meant. Nothing is left open.

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
        max_held: int = 10_000,
        max_held_bytes: int = 64 * 2**20,
        hwm: int = 100_000,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        curve: CurveKeys | None = None,
        context: "zmq.Context[Any] | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_endpoint(endpoint)
        if replay_endpoint is not None:
            check_endpoint(replay_endpoint)
        check_bounds(max_held=max_held, max_held_bytes=max_held_bytes, max_message_bytes=max_message_bytes)
        self.replay_endpoint = replay_endpoint
        self._max_message_bytes = max_message_bytes
        self._curve = curve
        self._clock = clock
        self._owns_context = context is None
        self._context: zmq.Context[Any] = zmq.Context() if context is None else context
        self._machine = Continuity(
            replay_endpoint is not None,
            clock(),
            replay_timeout_s,
            max_attempts,
            silence_after_s,
            max_held,
            max_held_bytes,
        )
        self._ready: deque[StreamItem] = deque()
        self._asked: ReplayRequest | None = None
        self._replay: zmq.SyncSocket | None = None
        self._num_connections = 0
        self._num_unreadable = 0
        self._binds = binds
        self._reconnect_at: float | None = None
        self._reconnect_wait_s = _FIRST_RECONNECT_S
        # `close` from another thread or task wakes whoever waits, who then closes the sockets.
        self._lock = threading.Lock()
        self._is_iterating = False
        self._is_closing = False
        self._is_closed = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._live: zmq.SyncSocket = self._context.socket(zmq.SUB)
        self._monitor: zmq.SyncSocket | None = None
        try:
            self._live.setsockopt(zmq.RCVHWM, hwm)
            self._monitor = self._live.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            self.endpoint = self._attach(self._live, endpoint, binds)
            self._live.setsockopt(zmq.SUBSCRIBE, topic.encode())
            self._send_request()
        except BaseException:
            self._close_sockets()
            raise

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
                    await self._wait_async(self._find_wait_s())
                if self._is_closing:
                    raise StopAsyncIteration
            return self._ready.popleft()
        finally:
            self._end_iterating()

    def poll(self, timeout_s: float = 0.0) -> list[StreamItem]:
        """What is there, in order, after waiting up to `timeout_s` for a first item; [] if none came."""
        if not self._begin_iterating():
            return []
        try:
            give_up = self._clock() + timeout_s
            while not self._ready and not self._is_closing:
                left_s = max(0.0, give_up - self._clock())
                wait_s = self._find_wait_s()
                self._wait_and_read(left_s if wait_s is None else min(wait_s, left_s))
                if self._clock() >= give_up:
                    break
            items = list(self._ready)
            self._ready.clear()
            return items
        finally:
            self._end_iterating()

    def stats(self) -> SubscriberStatistics:
        """The numbers so far. From any thread."""
        machine = self._machine
        return SubscriberStatistics(
            counts=machine.counts(),
            next_sequence=machine.expected,
            is_recovering=machine.is_recovering,
            is_incomplete=machine.is_incomplete,
            is_silent=machine.is_silent,
            num_held=machine.num_held,
            num_connections=self._num_connections,
            num_unreadable=self._num_unreadable,
        )

    def close(self) -> None:
        """End: an iteration under way stops, and the sockets are closed. Does nothing the second time."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            if self._is_iterating:
                self._wake_writer.send(b"x")
                return
        self._close_sockets()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _begin_iterating(self) -> bool:
        with self._lock:
            if self._is_closing:
                return False
            if self._is_iterating:
                raise InvalidArgumentError("someone iterates over this subscriber already")
            self._is_iterating = True
            return True

    def _end_iterating(self) -> None:
        with self._lock:
            self._is_iterating = False
            is_closing = self._is_closing
        if is_closing:
            self._close_sockets()

    def _find_wait_s(self) -> float | None:
        if self._machine.has_ready:
            return 0.0
        times = [one for one in (self._machine.deadline, self._reconnect_at) if one is not None]
        return max(0.0, min(times) - self._clock()) if times else None

    def _sockets(self) -> list["zmq.SyncSocket"]:
        return [one for one in (self._monitor, self._live, self._replay) if one is not None]

    def _wait_and_read(self, wait_s: float | None) -> None:
        if self._read():
            return
        poller = zmq.Poller()
        for one in self._sockets():
            poller.register(one, zmq.POLLIN)
        poller.register(self._wake_reader.fileno(), zmq.POLLIN)
        # Rounded up, since waking a moment too early would mean to turn around for nothing.
        poller.poll(None if wait_s is None else int(wait_s * 1000) + 1)
        self._read()

    async def _wait_async(self, wait_s: float | None) -> None:
        """Until a socket may have something. ZeroMQ's descriptors say so, without sockets of another kind."""
        loop = asyncio.get_running_loop()
        has_news = asyncio.Event()
        descriptors: list[Any] = [self._wake_reader.fileno(), *(one.FD for one in self._sockets())]
        for descriptor in descriptors:
            loop.add_reader(descriptor, has_news.set)
        try:
            # A descriptor tells of changes only: what came before it was watched has to be looked for.
            if not any(int(one.EVENTS) & zmq.POLLIN for one in self._sockets()):
                await asyncio.wait_for(has_news.wait(), wait_s)
        except TimeoutError:
            pass
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)

    def _read(self) -> bool:
        """Take some of what has arrived, without waiting. True if there was anything, or there is an item."""
        if self._machine.has_ready:
            self._take(self._machine.take_held(self._clock()))
            return True
        arrived: list[list[bytes]] = []
        num_bytes = 0
        while len(arrived) < _READ_AT_ONCE and num_bytes < _READ_BYTES_AT_ONCE:
            message = receive(self._live)
            if message is None:
                break
            arrived.append(message)
            num_bytes += len(message[-1])
        num_read = len(arrived)
        # After them, and told before them: what comes over a new connection may be of a new life.
        while self._monitor is not None and (event := receive(self._monitor)) is not None:
            num_read += 1
            if int.from_bytes(event[0][:2], sys.byteorder) == zmq.EVENT_DISCONNECTED:
                self._plan_reconnect()
                continue
            self._num_connections += 1
            self._reconnect_at = None
            self._take(self._machine.take_connected(self._clock()))
        if arrived:
            self._reconnect_wait_s = _FIRST_RECONNECT_S
        for message in arrived:
            self._take_live(message)
        num_replies = num_bytes = 0
        while num_replies < _READ_AT_ONCE and num_bytes < _READ_BYTES_AT_ONCE:
            # Taking a reply may end the request, and with it its socket.
            message = receive(self._replay) if self._replay is not None else None
            if message is None:
                break
            num_replies += 1
            num_bytes += len(message[-1])
            self._take_reply(message)
        if self._reconnect_at is not None and self._clock() >= self._reconnect_at:
            self._reconnect()
        self._take(self._machine.take_time(self._clock()))
        return num_read + num_replies > 0 or bool(self._ready)

    def _take(self, items: list[StreamItem]) -> None:
        self._ready.extend(items)
        if self._machine.request is not self._asked:
            self._send_request()

    def _take_live(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 3:
                raise EventStreamError(f"a live message has {len(frames)} frames")
            sequence = unpack_sequence(frames[1])
            if sequence > MAX_SEQUENCE:
                raise EventStreamError("a live message has the number of the end marker")
        except EventStreamError:
            self._num_unreadable += 1
            return
        self._take(self._machine.take_live(sequence, frames[2], self._clock()))

    def _take_reply(self, frames: list[bytes]) -> None:
        now = self._clock()
        try:
            # With the topic since vLLM 0.26, without it before.
            if len(frames) not in (3, 4) or frames[0]:
                raise EventStreamError(f"a reply has {len(frames)} frames")
            if frames[-2] == END_OF_REPLAY:
                self._take(self._machine.take_replay_end(now))
                return
            sequence = unpack_sequence(frames[-2])
        except EventStreamError:
            self._num_unreadable += 1
            return
        self._take(self._machine.take_replayed(sequence, frames[-1], now))

    def _send_request(self) -> None:
        """Ask what the machine wants asked, over a connection of its own, and nothing else any more."""
        request = self._machine.request
        self._asked = request
        if self._replay is not None:
            self._replay.close(linger=0)
            self._replay = None
        if request is None or self.replay_endpoint is None:
            return
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.setsockopt(zmq.LINGER, 0)
        # Beyond this the publisher's side waits: a ROUTER keeps a whole replay for its reader.
        self._replay.setsockopt(zmq.RCVHWM, _REPLAY_HWM)
        self._attach(self._replay, self.replay_endpoint, False)
        self._replay.send_multipart([b"", pack_sequence(request.start)])

    def _plan_reconnect(self) -> None:
        """Connect again soon, unless ZeroMQ does: it does not after a message beyond the size limit."""
        if not self._binds and self._reconnect_at is None:
            self._reconnect_at = self._clock() + self._reconnect_wait_s
            self._reconnect_wait_s = min(2 * self._reconnect_wait_s, _MAX_RECONNECT_S)

    def _reconnect(self) -> None:
        self._reconnect_at = None
        with contextlib.suppress(zmq.ZMQError):  # ZeroMQ has given this connection up itself
            self._live.disconnect(self.endpoint)
        self._live.connect(self.endpoint)

    def _attach(self, one: "zmq.SyncSocket", endpoint: str, binds: bool) -> str:
        """Connect or bind; the endpoint with its real port."""
        try:
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.IPV6, is_ipv6(endpoint))
            one.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
            if self._curve is not None:
                one.curve_serverkey = self._curve.server_public_key
                one.curve_publickey = self._curve.public_key
                one.curve_secretkey = self._curve.secret_key
            if not binds:
                one.connect(endpoint)
                return endpoint
            one.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno == zmq.EINVAL and self._curve is not None:
                raise InvalidArgumentError(
                    f"keys of {endpoint}: {error}; they are 40 bytes of Z85"
                ) from error
            verb = "bind" if binds else "connect to"
            raise EndpointError(error.errno, f"cannot {verb} {endpoint}: {error}") from error
        return bytes(one.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def _close_sockets(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = self._is_closing = True
        if self._monitor is not None:
            self._live.disable_monitor()
            self._monitor.close(linger=0)
        for one in (self._live, self._replay):
            if one is not None:
                one.close(linger=0)
        self._wake_reader.close()
        self._wake_writer.close()
        if self._owns_context:
            self._context.term()


def check_bounds(**bounds: int) -> None:
    """Raise InvalidArgumentError for a bound below 1, which ZeroMQ would take for none."""
    for name, bound in bounds.items():
        if bound < 1:
            raise InvalidArgumentError(f"{name} is {bound}; it is at least 1")


def receive(one: "zmq.SyncSocket") -> list[bytes] | None:
    """The next message of a socket, None if there is none yet."""
    try:
        frame = one.recv(zmq.NOBLOCK, copy=False, track=False)
    except zmq.Again:
        return None
    # Not `recv_multipart`, which takes 1 µs for each frame to ask the socket whether another one follows.
    frames = [frame.bytes]
    while frame.more:
        frame = one.recv(copy=False, track=False)
        frames.append(frame.bytes)
    return frames
