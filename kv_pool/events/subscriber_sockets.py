"""`SubscriberSockets`: the sockets of a subscriber for live batches, replays and connection events."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from typing import Any

from kv_pool.errors import InvalidArgumentError
from kv_pool.events.batch import pack_sequence
from kv_pool.events.continuity import GrowingPause
from kv_pool.events.curve_keys import CurveKeys
from kv_pool.events.endpoints import is_ipv6
from kv_pool.events.sockets import attach, report_failure, zmq

# Messages read from a socket per turn: enough to spread the cost of a turn, few enough to limit the memory of
# decoded batches.
_READ_AT_ONCE = 16
_READ_BYTES_AT_ONCE = 2**18

_REPLAY_HWM = 1000
_FIRST_RECONNECT_S = 0.2
_MAX_RECONNECT_S = 5.0


class SubscriberSockets:
    """A SUB socket with its monitor, a DEALER socket per request, and a socket pair to interrupt a wait.

    Args:
        endpoint: the publisher's PUB socket.
        topic: receive only batches whose topic has this prefix.
        binds: bind `endpoint` instead of connecting.
        hwm: number of live batches that ZeroMQ queues; more are dropped.
        max_message_bytes: maximum size of a frame; ZeroMQ disconnects from a publisher that sends a larger
            one.
        curve: keys, for a publisher that encrypts.
        context: a ZeroMQ context; None for a new one.
        clock: in seconds.

    Attributes:
        endpoint: with the actual port.
        reconnecting: the pause before `reconnect_if_due` reconnects.
        is_connected: a publisher is connected now, as far as is known by the last `read`.

    Raises:
        EndpointError: an endpoint that cannot be connected to or bound. Nothing is left open.
        InvalidArgumentError: a key that cannot be used. Nothing is left open.

    Used by one thread or task at a time, except `wake`.
    """

    def __init__(
        self,
        endpoint: str,
        topic: str,
        binds: bool,
        hwm: int,
        max_message_bytes: int,
        curve: CurveKeys | None,
        context: "zmq.Context[Any] | None",
        clock: Callable[[], float],
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._curve = curve
        self._clock = clock
        self._binds = binds
        self.reconnecting = GrowingPause(_FIRST_RECONNECT_S, _MAX_RECONNECT_S)
        self.is_connected = False
        self._owns_context = context is None
        self._monitor: zmq.SyncSocket | None = None
        self._replay: zmq.SyncSocket | None = None
        with report_failure(endpoint), contextlib.ExitStack() as on_failure:
            self._context: zmq.Context[Any] = zmq.Context() if context is None else context
            if self._owns_context:
                on_failure.callback(self._context.term)
            self._wake_reader, self._wake_writer = map(on_failure.enter_context, socket.socketpair())
            self._live: zmq.SyncSocket = self._context.socket(zmq.SUB)
            on_failure.pop_all()
            on_failure.callback(self.close)
            self._live.setsockopt(zmq.RCVHWM, hwm)
            self._monitor = self._live.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            self.endpoint = self._attach(self._live, endpoint, binds)
            self._live.setsockopt(zmq.SUBSCRIBE, topic.encode())
            on_failure.pop_all()

    # ---- waiting -----------------------------------------------------------------------------------

    def wait(self, wait_s: float | None) -> None:
        """Wait until a socket is readable or `wake` is called, up to `wait_s`; None for no limit."""
        poller = zmq.Poller()
        for one in self._list():
            poller.register(one, zmq.POLLIN)
        poller.register(self._wake_reader.fileno(), zmq.POLLIN)
        # Rounded up: waking too early would cost an extra turn.
        poller.poll(None if wait_s is None else int(wait_s * 1000) + 1)

    async def wait_async(self, wait_s: float | None) -> None:
        """Wait as `wait` does, in an event loop, by watching the file descriptors of the sockets."""
        loop = asyncio.get_running_loop()
        has_news = asyncio.Event()
        descriptors: list[Any] = [self._wake_reader.fileno(), *(one.FD for one in self._list())]
        for descriptor in descriptors:
            loop.add_reader(descriptor, has_news.set)
        try:
            # A descriptor signals changes only: check for messages that arrived before it was watched.
            if not any(int(one.EVENTS) & zmq.POLLIN for one in self._list()):
                await asyncio.wait_for(has_news.wait(), wait_s)
        except TimeoutError:
            pass
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)

    def wake(self) -> None:
        """Interrupt the current wait, or the next one."""
        self._wake_writer.send(b"x")

    def _list(self) -> list["zmq.SyncSocket"]:
        return [one for one in (self._monitor, self._live, self._replay) if one is not None]

    # ---- reading -----------------------------------------------------------------------------------

    def read(self) -> tuple[list[list[bytes]], int, bool]:
        """Read from the live socket and its monitor, without waiting.

        Returns:
            The frames of some of the messages that have arrived, the number of times that the connection was
            established, and whether there was anything to read. The monitor is read last, so that it has
            reported the connection of each of these messages.
        """
        messages = receive_some(self._live)
        num_events = num_connections = 0
        while self._monitor is not None and (event := receive(self._monitor)) is not None:
            num_events += 1
            self.is_connected = int.from_bytes(event[0][:2], sys.byteorder) != zmq.EVENT_DISCONNECTED
            if not self.is_connected:
                # ZeroMQ reconnects by itself, but not after a message beyond the size limit.
                if not self._binds and self.reconnecting.due_s is None:
                    self.reconnecting.plan(self._clock())
            else:
                num_connections += 1
                self.reconnecting.due_s = None
        if messages:
            self.reconnecting.shorten()
        return messages, num_connections, bool(messages) or num_events > 0

    def read_replies(self) -> list[list[bytes]]:
        """Return the frames of some of the replies to the last request that have arrived."""
        return [] if self._replay is None else receive_some(self._replay)

    def reconnect_if_due(self) -> None:
        """Reconnect when a planned reconnection is due."""
        if self.reconnecting.is_due(self._clock()):
            self.reconnecting.due_s = None
            with contextlib.suppress(zmq.ZMQError):  # ZeroMQ may have dropped the endpoint already
                self._live.disconnect(self.endpoint)
            self._live.connect(self.endpoint)

    # ---- requests, opening, closing ----------------------------------------------------------------

    def ask(self, replay_endpoint: str | None, start: int | None) -> None:
        """Send a request for the batches from `start` on over a new connection; cancel the previous request.

        If the endpoint or `start` is None, only cancels.
        """
        if self._replay is not None:
            self._replay.close(linger=0)
            self._replay = None
        if start is None or replay_endpoint is None:
            return
        with report_failure(replay_endpoint):
            self._replay = self._context.socket(zmq.DEALER)
        self._replay.setsockopt(zmq.LINGER, 0)
        # Beyond this limit replies stay with the publisher, whose ROUTER queues them.
        self._replay.setsockopt(zmq.RCVHWM, _REPLAY_HWM)
        self._attach(self._replay, replay_endpoint, False)
        self._replay.send_multipart([b"", pack_sequence(start)])

    def _attach(self, one: "zmq.SyncSocket", endpoint: str, binds: bool) -> str:
        """Connect or bind with this subscriber's settings; return the endpoint with its actual port."""
        one.setsockopt(zmq.LINGER, 0)
        one.setsockopt(zmq.IPV6, is_ipv6(endpoint))
        one.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        if self._curve is not None:
            try:
                one.curve_serverkey = self._curve.server_public_key
                one.curve_publickey = self._curve.public_key
                one.curve_secretkey = self._curve.secret_key
            except zmq.ZMQError as error:
                raise InvalidArgumentError(
                    f"keys of {endpoint}: {error}; a key is 40 bytes of Z85"
                ) from error
        return attach(one, endpoint, binds)

    def close(self) -> None:
        """Close all sockets, and the context unless it was passed in. Call it once."""
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


def receive_some(one: "zmq.SyncSocket") -> list[list[bytes]]:
    """Return some of the messages that have arrived at a socket."""
    messages: list[list[bytes]] = []
    num_bytes = 0
    while len(messages) < _READ_AT_ONCE and num_bytes < _READ_BYTES_AT_ONCE:
        message = receive(one)
        if message is None:
            break
        messages.append(message)
        num_bytes += len(message[-1])
    return messages


def receive(one: "zmq.SyncSocket") -> list[bytes] | None:
    """Return the next message of a socket; None if there is none yet."""
    try:
        frame = one.recv(zmq.NOBLOCK, copy=False, track=False)
    except zmq.Again:
        return None
    # `recv_multipart` takes 1 µs more per frame, to ask the socket whether another one follows.
    frames = [frame.bytes]
    while frame.more:
        frame = one.recv(copy=False, track=False)
        frames.append(frame.bytes)
    return frames
