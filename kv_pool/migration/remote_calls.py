"""Calls between nodes over ZeroMQ: `RemoteCalls` makes them, `CallServer` has a node answer them."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from kv_pool.closing import Running
from kv_pool.errors import (
    InvalidArgumentError,
    KVPoolError,
    OutOfThreadsError,
    PeerAuthenticationError,
    PeerUnavailableError,
)
from kv_pool.events.sockets import zmq
from kv_pool.ids import NodeName
from kv_pool.loggers import get_logger
from kv_pool.migration import addresses, messages
from kv_pool.migration.bulk_listener import MAX_READERS, BulkListener
from kv_pool.migration.channel import Channel
from kv_pool.migration.secret import derive_curve_pair
from kv_pool.threads import Workers, start_thread

_logger = get_logger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""The maximum size of one message."""
HANDSHAKE_S = 5.0
"""The time limit of a client's handshake."""

_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""The events of a socket monitor that report another secret or protocol at the other end."""

_MAX_THREADS = MAX_READERS + 64  # each reader may have a read in progress
_TICK_MS = 250
_GONE_S = 3.0
_MAX_IDLE = 8
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

    Attributes:
        is_closed: True after `close`.
    """

    def __init__(self, address: str, secret: bytes, caller: NodeName) -> None:
        self._keys = derive_curve_pair(secret)
        self.address = address
        self._caller = caller.encode()
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self.is_closed = False

    def call(self, message: messages.Message, timeout_s: float) -> messages.Message:
        """Send a message and return the node's reply.

        Raises:
            PeerUnavailableError: no reply in time. The node may have executed the request; the caller decides
                whether to repeat it.
            PeerAuthenticationError: the node does not know the secret, or a message was altered.
            KVPoolError: the error that the node raised, with its type; MigrationError for errors of other
                libraries.
        """
        return self.begin(message)(time.monotonic() + timeout_s)

    def begin(
        self, message: messages.Message, beside: Channel | None = None, deadline: float = 0.0
    ) -> Callable[[float], messages.Message]:
        """Send a message. Return a function that waits for the reply until a `time.monotonic()` deadline.

        Both raise the errors of `call`. The call is abandoned if the function is not called.

        Args:
            beside: if given, first wait until this channel has something to read, the call has ended, or
                `deadline` has passed.
        """
        data = messages.encode_message(message)
        connection = self._take_connection()
        connection.send([self._caller, data])
        if beside is not None:
            connection.wait_beside(beside.connection, deadline - time.monotonic())
        return partial(self._finish, connection)

    def connect_bulk(self, message: messages.OpenBulk, timeout_s: float) -> Bulk:
        """Open a new connection to one of the node's backends. The caller closes it.

        Raises:
            PeerUnavailableError, PeerAuthenticationError: as for `call`.
            MigrationError: the node does not have this backend, or it cannot send blocks to this node.
        """
        deadline = time.monotonic() + timeout_s
        opened = messages.as_reply(self.call(message, timeout_s), messages.BulkOpened, self.address)
        address = addresses.format_address(addresses.parse_address(self.address)[0], opened.port)
        channel = Channel(addresses.connect_to(address, deadline - time.monotonic()), address)
        with ExitStack() as on_failure:
            on_failure.callback(channel.close)
            channel.send([memoryview(opened.ticket)], deadline)
            on_failure.pop_all()
        return Bulk(channel, opened.ticket, self)

    def close(self) -> None:
        """Close all connections. Calls in progress and later calls fail with PeerUnavailableError."""
        with self._lock:
            self.is_closed = True
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

    def _finish(self, connection: _Connection, deadline: float) -> messages.Message:
        with ExitStack() as on_failure:
            on_failure.callback(connection.close)
            reply = messages.decode_message(self._wait_for_reply(connection, deadline))
            with self._lock:
                if not self.is_closed and len(self._idle) < _MAX_IDLE:
                    self._idle.append(connection)
                    on_failure.pop_all()
        return messages.check_reply(reply, self.address)

    def _wait_for_reply(self, connection: _Connection, deadline: float) -> bytes:
        while (rest_s := deadline - time.monotonic()) > 0:
            self._check_open()
            reply = connection.receive(min(rest_s, _CLOSED_CHECK_S))
            if reply is not None:
                return reply
        raise PeerUnavailableError(f"{self.address} did not answer in time")

    def _check_open(self) -> None:
        if self.is_closed:
            raise PeerUnavailableError(f"{self.address}: these calls were closed")


@dataclass(frozen=True)
class Bulk:
    """The reader's end of an open connection for bytes of blocks.

    Attributes:
        calls: to the source, which asks it for bytes.
    """

    channel: Channel
    ticket: bytes
    calls: RemoteCalls


class _Connection:
    """One encrypted connection with one request at a time. It is not opened again once it is broken."""

    def __init__(self, address: str, keys: tuple[bytes, bytes]) -> None:
        self._opened = ExitStack()
        self._process_id = os.getpid()
        self._address = address
        place = addresses.resolve(address)
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
            zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED
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

    def wait_beside(self, other: socket.socket, timeout_s: float) -> None:
        """Wait until `receive` would return or raise at once, or the other socket has something to read."""
        self._poller.register(other, zmq.POLLIN)
        self._poller.poll(max(1, int(timeout_s * 1000)))
        self._poller.unregister(other)

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


class CallServer(Running):
    """The listening side of calls, and of the connections over which backends send bytes of blocks.

        with CallServer("127.0.0.1:0", load_secret("secret"), node.answer) as server:
            print(server.address)

    Args:
        listen: host:port; port 0 selects a free port.
        secret: shared by the nodes. A client with another one fails the CURVE handshake.
        answer: called by several threads. A KVPoolError is sent to the caller; any other error is logged, and
            its description is sent.
        bulk: the connections of readers, at the same host; stopped with this server.
        on_gone: called with the name of a node that has had no connection for three seconds, as when its
            process has ended. A suspended node keeps its connections.
    Raises:
        MissingDependencyError: pyzmq is not installed.

    One thread receives and sends. Up to 64 threads answer, besides one for each read of blocks, and further
    calls wait. If the system cannot start a thread, the caller gets an error, and the server continues.

    Attributes:
        address: the listening address, host:port with the actual port; "" while stopped.
    """

    def __init__(
        self,
        listen: str,
        secret: bytes,
        answer: messages.Answer,
        *,
        bulk: BulkListener | None = None,
        on_gone: Callable[[NodeName], object] = lambda caller: None,
    ) -> None:
        self.listen = listen
        self.address = ""
        self.bulk = BulkListener({}) if bulk is None else bulk
        self._public_key, self._secret_key = derive_curve_pair(secret)
        self._answer = answer
        self._on_gone = on_gone
        self._callers: dict[int, NodeName] = {}  # by the descriptor of the connection
        self._gone: dict[NodeName, float] = {}  # since when they have no connection
        self._open = ExitStack()
        self._answering = threading.Lock()
        self._receiving: threading.Thread | None = None

    def start(self) -> None:
        """Start listening; nodes can connect on return.

        Raises:
            InvalidArgumentError: the server is already listening, or `listen` is not a valid address.
            EndpointError: the address cannot be used, such as a port in use. Nothing is open.
            OutOfThreadsError: the system cannot start a thread. Nothing is open.
        """
        if self.address:
            raise InvalidArgumentError(f"this server is already listening at {self.address}")
        with ExitStack() as on_failure:
            listener = on_failure.enter_context(addresses.bind_listener(self.listen))
            place = listener.getsockname()
            on_failure.callback(self.bulk.stop)
            self.bulk.start(addresses.parse_address(self.listen)[0])
            context = zmq.Context()
            on_failure.callback(context.destroy, linger=0)
            self._admitting = context.socket(zmq.REP)
            self._admitting.bind("inproc://zeromq.zap.01")  # asked by ZeroMQ about each client's key
            self._answers = context.socket(zmq.PULL)
            self._answers.bind("inproc://answers")
            self._answered = context.socket(zmq.PUSH)
            self._answered.sndhwm = 0  # a worker never waits
            self._answered.connect("inproc://answers")
            self._router = router = context.socket(zmq.ROUTER)
            router.linger = 0
            router.ipv6 = ":" in place[0]
            router.maxmsgsize = MAX_MESSAGE_BYTES
            router.handshake_ivl = int(HANDSHAKE_S * 1000)
            router.tcp_keepalive = 1
            router.curve_server = True
            router.curve_secretkey = self._secret_key
            self._ends = router.get_monitor_socket(zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED)
            on_failure.callback(router.disable_monitor)
            router.use_fd = listener.detach()
            router.bind(f"tcp://{addresses.format_address(*place[:2])}")
            self._workers = Workers("kv_pool node answers", _MAX_THREADS)
            self._receiving = start_thread("kv_pool node", self._run)
            self._open = on_failure.pop_all()
        self.address = addresses.format_address(*place[:2])
        if not addresses.is_loopback(place[0]):
            _logger.warning(
                "listening at %s, which other machines may reach: every client that knows the shared secret "
                "is served. Blocks are sent over the network unencrypted",
                self.address,
            )

    def stop(self) -> None:
        """Close all connections and wait for the answers in progress.

        Do not call it while holding a lock that an answer may need.
        """
        if self._receiving is None:
            return
        self._send_answer([b""])
        self._receiving.join()
        with self._answering:
            self._open.close()
        self._workers.stop()
        self._workers.join()
        self._receiving = None
        self.address = ""

    # ---- in the receiving thread -----------------------------------------------------------------

    def _run(self) -> None:
        answer: list[bytes] = []
        while answer != [b""]:
            bulk = self.bulk.list_sockets()
            poller = zmq.Poller()
            for one in (self._router, self._admitting, self._ends, self._answers, *bulk):
                poller.register(one, zmq.POLLIN)
            ready = dict(poller.poll(_TICK_MS if self.bulk.is_used() or self._gone else None))
            try:
                if self._admitting in ready:
                    self._admit()
                self._note_ends()  # before a request: a new connection may reuse a descriptor
                if self._router in ready:
                    self._receive(self._router.recv_multipart(copy=False))
                if self._answers in ready:
                    answer = self._answers.recv_multipart()
                    self._router.send_multipart(answer)
                self.bulk.go_on([one for one in bulk if one.fileno() in ready])
            except Exception:
                _logger.exception("failed to serve a client of %s", self.address)

    def _admit(self) -> None:
        """Admit the clients that have the key of this secret (ZeroMQ's authentication protocol, RFC 27)."""
        version, request_id, *_, key = self._admitting.recv_multipart()
        code = b"200" if zmq.utils.z85.encode(key) == self._public_key else b"400"
        self._admitting.send_multipart([version, request_id, code, b"", b"", b""])

    def _note_ends(self) -> None:
        """Note the connections that have ended, and report the nodes without one."""
        while self._ends.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self._ends)
            if event["event"] != zmq.EVENT_DISCONNECTED:
                _logger.info(
                    "a client of %s was not authenticated: another secret, or not a kv_pool node",
                    self.address,
                )
                continue
            caller = self._callers.pop(event["value"], None)
            if caller is not None and caller not in self._callers.values():
                self._gone[caller] = time.monotonic()
        for caller, since in list(self._gone.items()):
            if time.monotonic() - since > _GONE_S:
                del self._gone[caller]
                self._workers.submit(partial(self._on_gone, caller))

    def _receive(self, frames: list[zmq.Frame]) -> None:
        if len(frames) != 3:
            return
        client, name, data = (frame.bytes for frame in frames)
        caller = NodeName(name.decode(errors="replace"))
        connection = frames[2].get(zmq.SRCFD)
        assert isinstance(connection, int)
        self._callers[connection] = caller
        self._gone.pop(caller, None)
        try:
            self._workers.submit(partial(self._reply, client, caller, data))
        except OutOfThreadsError as error:
            _logger.warning("refused a call from %s: %s", caller, error, extra={"node": caller})
            failed = messages.describe_failure(PeerUnavailableError(str(error)))
            self._router.send_multipart([client, messages.encode_message(failed)])

    # ---- in a thread for answers -----------------------------------------------------------------

    def _reply(self, client: bytes, caller: NodeName, data: bytes) -> None:
        try:
            message = messages.decode_message(data)
            if isinstance(message, messages.OpenBulk):
                reply: messages.Message = self.bulk.admit(message, caller)
            elif isinstance(message, messages.ReadBlocks):
                reply = self.bulk.send(message, caller)
            else:
                reply = self._answer(message, caller)
            encoded = messages.encode_message(reply)
        except Exception as error:
            if not isinstance(error, KVPoolError):
                _logger.exception("failed to answer node %s", caller, extra={"node": caller})
            encoded = messages.encode_message(messages.describe_failure(error))
        self._send_answer([client, encoded])

    def _send_answer(self, answer: list[bytes]) -> None:
        """Pass an answer to the receiving thread; `[b""]` ends it."""
        with self._answering, suppress(zmq.ZMQError):  # the server has stopped
            self._answered.send_multipart(answer)
