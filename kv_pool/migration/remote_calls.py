"""`RemoteCalls`: calls to another node over ZeroMQ."""

from __future__ import annotations

import functools
import os
import threading
import time
from contextlib import ExitStack, suppress

from kv_pool.closing import Closing
from kv_pool.errors import PeerAuthenticationError, PeerUnavailableError
from kv_pool.events.zmq_module import zmq
from kv_pool.ids import NodeName
from kv_pool.migration import messages
from kv_pool.migration.addresses import connect_to, format_address, parse_address, resolve
from kv_pool.migration.channel import MAX_MESSAGE_BYTES, Channel
from kv_pool.migration.secret import derive_curve_pair

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""The events of a socket monitor that report another secret or protocol at the other end."""

_MAX_IDLE = 4
_MAX_SOCKETS = 16_384
_CLOSED_CHECK_S = 0.1  # how soon a call in progress notices `close`


class RemoteCalls:
    """Calls to the node that listens at an address. Thread-safe.

    Args:
        address: host:port.
        secret: shared with that node.
        caller: the name of the calling node.

    The connection is opened by the first call and encrypted. Concurrent calls use separate connections, so a
    long call does not delay others. Idle connections are reused; one that the node has closed is replaced
    before use.
    """

    def __init__(self, address: str, secret: bytes, caller: NodeName) -> None:
        self._keys = derive_curve_pair(secret)
        self.address = address
        self._caller = caller.encode()
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._is_closed = False

    def call(self, message: messages.Message, timeout_s: float) -> messages.Message:
        """Send a message and return the node's reply.

        Raises:
            PeerUnavailableError: no reply in time. The node may have executed the request; the caller decides
                whether to repeat it.
            PeerAuthenticationError: the node does not know the secret, or a message was altered.
            KVPoolError: the error that the node raised, with its type; MigrationError for errors of other
                libraries.
        """
        deadline = time.monotonic() + timeout_s
        data = messages.encode_message(message)
        with ExitStack() as on_failure:
            connection = on_failure.enter_context(self._take_connection())
            connection.send([self._caller, data])
            reply = messages.decode_message(self._wait_for_reply(connection, deadline))
            with self._lock:
                if not self._is_closed and len(self._idle) < _MAX_IDLE:
                    self._idle.append(connection)
                    on_failure.pop_all()
        return messages.check_reply(reply, self.address)

    def connect_bulk(self, backend: str, timeout_s: float) -> Channel:
        """Open a new connection to the node's backend of this name. The caller closes it.

        Raises:
            PeerUnavailableError, PeerAuthenticationError: as for `call`.
            MigrationError: the node does not have this backend.
        """
        deadline = time.monotonic() + timeout_s
        opened = messages.as_reply(
            self.call(messages.OpenBulk(backend), timeout_s), messages.BulkOpened, self.address
        )
        address = format_address(parse_address(self.address)[0], opened.port)
        connection = connect_to(address, deadline - time.monotonic())
        channel = Channel(connection, opened.key, True, address)
        channel.send_raw([memoryview(opened.ticket)], deadline)
        return channel

    def close(self) -> None:
        """Close all connections. Calls in progress and later calls fail with PeerUnavailableError."""
        with self._lock:
            self._is_closed = True
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def _take_connection(self) -> _Connection:
        with self._lock:
            self._check_open()
            while self._idle:
                connection = self._idle.pop()
                if connection.is_quiet():
                    return connection
                connection.close()
        try:
            return _Connection(self.address, self._keys)
        except zmq.ZMQError as error:  # out of file handles
            raise PeerUnavailableError(f"{self.address}: cannot connect: {error}") from error

    def _wait_for_reply(self, connection: _Connection, deadline: float) -> bytes:
        while (rest_s := deadline - time.monotonic()) > 0:
            self._check_open()
            reply = connection.receive(min(rest_s, _CLOSED_CHECK_S))
            if reply is not None:
                return reply
        raise PeerUnavailableError(f"{self.address} did not answer in time")

    def _check_open(self) -> None:
        if self._is_closed:
            raise PeerUnavailableError(f"{self.address}: these calls were closed")


class _Connection(Closing):
    """One encrypted connection with one request at a time. It is not opened again once it is broken."""

    def __init__(self, address: str, keys: tuple[bytes, bytes]) -> None:
        self._opened = ExitStack()
        self._process_id = os.getpid()
        self._address = address
        place = resolve(address)
        self._socket = socket = _get_context(self._process_id).socket(zmq.DEALER)
        self._opened.callback(socket.close)
        socket.linger = 0
        socket.reconnect_ivl = -1
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.tcp_keepalive = 1
        socket.ipv6 = place.startswith("[")
        socket.curve_publickey, socket.curve_secretkey = keys
        socket.curve_serverkey = keys[0]
        # Only what ends a connection is reported.
        self._failures = socket.get_monitor_socket(
            zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
        )
        self._opened.callback(self._failures.close)
        self._opened.callback(socket.disable_monitor)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._failures, zmq.POLLIN)
        socket.connect(f"tcp://{place}")

    def send(self, frames: list[bytes]) -> None:
        """Send a request. If the connection is broken, `receive` raises the error."""
        with suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the reply; None if there is none within `timeout_s`. Raises PeerUnavailableError."""
        ready = dict(self._poller.poll(max(1, int(timeout_s * 1000))))
        if self._socket in ready:
            return self._socket.recv_multipart()[-1]
        if self._failures not in ready:
            return None
        event = zmq.utils.monitor.recv_monitor_message(self._failures)["event"]
        if event == zmq.EVENT_CLOSED:
            raise PeerUnavailableError(f"{self._address}: cannot connect")
        if event == zmq.EVENT_DISCONNECTED:
            raise PeerUnavailableError(f"{self._address} closed the connection")
        raise PeerAuthenticationError(
            f"{self._address} closed the connection during the handshake: the node has another secret, or is "
            "not a kv_pool node"
        )

    def is_quiet(self) -> bool:
        """Return True if the connection appears to be open and has no unread reply."""
        return self._process_id == os.getpid() and not self._poller.poll(0)

    def close(self) -> None:
        """Close the connection, unless it belongs to the process from which this one was forked."""
        if self._process_id == os.getpid():
            self._opened.close()

    def __del__(self) -> None:
        self.close()


@functools.cache
def _get_context(process_id: int) -> zmq.Context[zmq.SyncSocket]:
    """Return the context of all calls of this process; a forked process gets its own."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context
