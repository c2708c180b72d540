"""`CallServer`: the port of a node for messages over ZeroMQ; `BulkListener`: its port for bytes of blocks."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from kv_pool.closing import Running
from kv_pool.errors import (
    InvalidArgumentError,
    KVPoolError,
    MigrationError,
    OutOfThreadsError,
    PeerAuthenticationError,
    PeerUnavailableError,
)
from kv_pool.events.zmq_module import zmq
from kv_pool.ids import NodeName
from kv_pool.migration import messages
from kv_pool.migration.addresses import bind_listener, format_address, is_loopback, parse_address, tune
from kv_pool.migration.channel import MAX_MESSAGE_BYTES, Channel
from kv_pool.migration.remote_calls import HANDSHAKE_FAILED
from kv_pool.migration.secret import derive_curve_pair
from kv_pool.threads import Workers, start_thread

_logger = logging.getLogger(__name__)

MAX_READERS = 256
MAX_STRANGERS = 64
TICKET_S = 5.0
"""How long a ticket is valid, and how long a connection may wait before it sends one."""
HANDSHAKE_S = 5.0
"""The time limit of a client's handshake."""

_MAX_THREADS = 64
_TICK_MS = 250
_GONE_S = 3.0
_TICKET_BYTES = 16
_KEY_BYTES = 32
_OUT_OF_HANDLES_S = 0.1

BulkHandler = Callable[[Channel, NodeName], None]
"""Serves one reader of a backend; called with the channel and the name of the reader's node.

The connection ends when it returns or raises a KVPoolError.
"""


@dataclass(frozen=True)
class _Admission:
    key: bytes
    handler: BulkHandler
    caller: NodeName
    deadline: float


class BulkListener:
    """Connections of readers that were admitted by an encrypted call: plain TCP, authenticated messages.

    A reader connects and sends its ticket; the connection is then a `Channel`, whose key was in the reply to
    that call. A ticket admits one connection. Anything else closes it.

    Args:
        handlers: by backend name, called in the thread of the connection; None for a backend without one.
        port: 0 selects a free port.

    At most `MAX_READERS` readers are admitted. A connection without a ticket is closed after `TICKET_S`, and
    the oldest one when there are more than `MAX_STRANGERS`.

    `CallServer` watches the sockets and calls `go_on`. Each admitted reader gets a thread; if the system
    cannot start one, the connection is closed.

    Attributes:
        port: the port that readers are told; set it if they reach this node through a forwarded port.
    """

    def __init__(self, handlers: Mapping[str, BulkHandler | None], port: int = 0) -> None:
        self.port = port
        self._listen_port = port
        self._handlers = {name: handler for name, handler in handlers.items() if handler is not None}
        self._listener: socket.socket | None = None
        self._strangers: dict[socket.socket, float] = {}  # connection -> deadline, oldest first
        self._lock = threading.Lock()
        self._admitted: dict[bytes, _Admission] = {}  # by ticket
        self._readers: dict[Channel, threading.Thread] = {}

    def start(self, host: str) -> None:
        """Listen at this host, if there are handlers. Raises EndpointError; nothing is open then."""
        if self._handlers:
            self._listener = bind_listener(format_address(host, self._listen_port))
            self.port = self._listen_port or self._listener.getsockname()[1]

    def stop(self) -> None:
        """Close all connections and wait for the threads of readers."""
        with self._lock:
            self._admitted.clear()
            readers = dict(self._readers)
        for connection in self.list_sockets():
            connection.close()
        self._listener, self._strangers = None, {}
        for channel, thread in readers.items():
            channel.abort()
            thread.join()

    def admit(self, backend: str, caller: NodeName) -> messages.BulkOpened:
        """Admit one connection to a backend.

        Raises:
            MigrationError: this node has no such backend that serves bytes.
            PeerUnavailableError: `MAX_READERS` connections are open or admitted.
        """
        handler = self._handlers.get(backend)
        if handler is None:
            known = ", ".join(sorted(self._handlers)) or "none"
            raise MigrationError(
                f"this node has no backend {backend!r} that serves bulk data; it has {known}"
            )
        ticket, key, now = os.urandom(_TICKET_BYTES), os.urandom(_KEY_BYTES), time.monotonic()
        with self._lock:
            self._admitted = {one: found for one, found in self._admitted.items() if found.deadline > now}
            num_readers = len(self._readers) + len(self._admitted)
            if num_readers >= MAX_READERS:
                raise PeerUnavailableError(
                    f"{num_readers} connections are open, which is the maximum; try again later"
                )
            self._admitted[ticket] = _Admission(key, handler, caller, now + TICKET_S)
        return messages.BulkOpened(self.port, ticket, key)

    # ---- in the thread of the server -------------------------------------------------------------

    def list_sockets(self) -> list[socket.socket]:
        """Return the sockets to watch: the listening one, and those of connections without a ticket."""
        return [*self._strangers] if self._listener is None else [self._listener, *self._strangers]

    def go_on(self, readable: Sequence[socket.socket]) -> None:
        """Accept connections, read tickets, and close late strangers. Call it once a second, too."""
        for one in readable:
            if one is self._listener:
                self._accept(one)
            else:
                del self._strangers[one]
                self._use_ticket(one)
        while self._strangers:
            oldest, deadline = next(iter(self._strangers.items()))
            if len(self._strangers) <= MAX_STRANGERS and deadline > time.monotonic():
                return
            del self._strangers[oldest]
            oldest.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
            tune(connection)
            self._strangers[connection] = time.monotonic() + TICKET_S
        except ConnectionAbortedError:
            pass  # closed by its client before this call
        except OSError as error:
            _logger.warning("cannot accept a reader at port %d: %s", self.port, error)
            time.sleep(_OUT_OF_HANDLES_S)  # the connection is still waiting: do not spin

    def _use_ticket(self, connection: socket.socket) -> None:
        """Start to serve the reader whose ticket has arrived; close any other connection."""
        ticket, place = b"", "a stranger"
        with suppress(OSError):  # the connection is broken
            ticket = connection.recv(_TICKET_BYTES, socket.MSG_DONTWAIT)
            place = format_address(*connection.getpeername()[:2])
        with self._lock:
            admission = self._admitted.pop(ticket, None)
        if admission is None or admission.deadline <= time.monotonic():
            connection.close()
            _logger.info("closed a connection from %s: it has no valid ticket", place)
            return
        channel = Channel(connection, admission.key, False, place)
        try:
            with self._lock:  # the new thread takes the lock before it ends
                self._readers[channel] = start_thread(
                    f"kv_pool node for {place}", self._serve, channel, admission
                )
        except OutOfThreadsError as error:
            _logger.warning("the connection of a reader is closed: %s", error)
            channel.close()

    # ---- in a reader's thread --------------------------------------------------------------------

    def _serve(self, channel: Channel, admission: _Admission) -> None:
        try:
            admission.handler(channel, admission.caller)
        except PeerAuthenticationError as error:
            _logger.warning("%s", error)
        except KVPoolError as error:
            _logger.debug("the connection from %s ended: %s", channel.peer, error)
        except Exception:
            _logger.exception("failed to serve a reader at %s", channel.peer)
        finally:
            channel.close()
            with self._lock:
                self._readers.pop(channel, None)


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

    One thread receives and sends; up to 64 threads answer, and further calls wait. If the system cannot start
    a thread, the caller gets an error, and the server continues.

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
            listener = on_failure.enter_context(bind_listener(self.listen))
            place = listener.getsockname()
            on_failure.callback(self.bulk.stop)
            self.bulk.start(parse_address(self.listen)[0])
            self._woken, self._waker = socket.socketpair()
            on_failure.callback(self._woken.close)
            on_failure.callback(self._waker.close)
            self._waker.setblocking(False)
            context = zmq.Context()
            on_failure.callback(context.destroy, linger=0)
            self._admitting = context.socket(zmq.REP)
            self._admitting.bind("inproc://zeromq.zap.01")  # asked by ZeroMQ about each client's key
            self._router = router = context.socket(zmq.ROUTER)
            router.linger = 0
            router.ipv6 = ":" in place[0]
            router.maxmsgsize = MAX_MESSAGE_BYTES
            router.handshake_ivl = int(HANDSHAKE_S * 1000)
            router.tcp_keepalive = 1
            router.curve_server = True
            router.curve_secretkey = self._secret_key
            self._ends = router.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED)
            on_failure.callback(router.disable_monitor)
            router.use_fd = listener.detach()
            router.bind(f"tcp://{format_address(*place[:2])}")
            self._workers = Workers("kv_pool node answers", _MAX_THREADS)
            self._replies: deque[tuple[bytes, bytes]] = deque()
            self._receiving = start_thread("kv_pool node", self._run)
            self._open = on_failure.pop_all()
        self.address = format_address(*place[:2])
        if not is_loopback(place[0]):
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
        self._waker.close()
        self._receiving.join()
        self._open.close()
        self._workers.stop()
        self._workers.join()
        self._receiving = None
        self.address = ""

    # ---- in the receiving thread -----------------------------------------------------------------

    def _run(self) -> None:
        router, woken = self._router, self._woken
        is_stopping = False
        while not is_stopping:
            bulk = self.bulk.list_sockets()
            poller = zmq.Poller()
            for one in (router, self._admitting, self._ends, woken, *bulk):
                poller.register(one, zmq.POLLIN)
            # Replies are left if an error interrupted the last turn.
            wait_ms = 0 if self._replies else _TICK_MS if len(bulk) > 1 or self._gone else None
            ready = dict(poller.poll(wait_ms))
            try:
                is_stopping = woken.fileno() in ready and not woken.recv(4096)
                if self._admitting in ready:
                    self._admit()
                self._note_ends()  # before a request: a new connection may reuse a descriptor
                if router in ready:
                    self._receive(router.recv_multipart(copy=False))
                while self._replies:
                    router.send_multipart(self._replies.popleft())
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
            _logger.warning("refused a call from %s: %s", caller, error)
            failed = messages.describe_failure(PeerUnavailableError(str(error)))
            self._replies.append((client, messages.encode_message(failed)))

    # ---- in a thread for answers -----------------------------------------------------------------

    def _reply(self, client: bytes, caller: NodeName, data: bytes) -> None:
        try:
            message = messages.decode_message(data)
            if isinstance(message, messages.OpenBulk):
                reply: messages.Message = self.bulk.admit(message.backend, caller)
            else:
                reply = self._answer(message, caller)
            encoded = messages.encode_message(reply)
        except Exception as error:
            if not isinstance(error, KVPoolError):
                _logger.exception("failed to answer node %s", caller)
            encoded = messages.encode_message(messages.describe_failure(error))
        self._replies.append((client, encoded))
        with suppress(OSError):  # many replies are waiting already, or the server has stopped
            self._waker.send(b"\0")


_logger = logging.getLogger(__name__)
