"""`Channel`: messages and raw bytes over a connection between two backends; `BulkListener` accepts them.

A message is two signed parts, its length in 4 bytes and its payload. A part is followed by its MAC of 32
bytes, HMAC-SHA256(key, number | part). Each direction has its own key, derived from one that the source has
sent over the encrypted connection for calls, and `number` counts its parts from 0, in 8 bytes; it is not
sent. All integers are big-endian.

A changed, forged, dropped, repeated or reordered message is therefore detected, and the length is verified
before memory is allocated for the payload. Raw bytes follow a message that announces them and have no MAC:
blocks have their own checksums.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kv_pool.errors import (
    InvalidArgumentError,
    KVPoolError,
    MigrationError,
    OutOfThreadsError,
    PeerAuthenticationError,
    PeerUnavailableError,
)
from kv_pool.ids import NodeName
from kv_pool.migration.addresses import bind_listener, format_address, tune
from kv_pool.migration.messages import BulkOpened
from kv_pool.threads import start_thread

_logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""The maximum size of one message."""
MAX_READERS = 256
MAX_STRANGERS = 64
TICKET_S = 5.0
"""How long a ticket is valid, and how long a connection may wait before it sends one."""

_NUMBER = struct.Struct(">Q")
_LENGTH = struct.Struct(">I")
_TIMEVAL = struct.Struct("@ll")
_MAC_BYTES = 32
_MAX_BUFFERS = 1024  # limit of one sendmsg or recvmsg on Linux and macOS (IOV_MAX)
_TICKET_BYTES = 16
_KEY_BYTES = 32
_OUT_OF_HANDLES_S = 0.1


class Channel:
    """An authenticated connection, used by one thread at a time; only `abort` may be called from another.

    Args:
        connection: a connected socket. The channel takes ownership.
        key: 32 bytes, chosen by the source.
        is_reader: which of the two ends this is.
        peer: a description of the peer for error messages.

    Every error closes the connection, except an oversized message to `send`.
    """

    def __init__(self, connection: socket.socket, key: bytes, is_reader: bool, peer: str) -> None:
        self.peer = peer
        self.connection = connection
        connection.settimeout(None)
        keys = [hmac.digest(key, side, "sha256") for side in (b"reader", b"source")]
        self._send_key, self._receive_key = keys if is_reader else reversed(keys)
        self._num_sent = self._num_received = 0

    def send(self, payload: bytes, deadline: float, raw: Sequence[memoryview] = ()) -> None:
        """Send one message, followed by raw bytes.

        Args:
            deadline: a `time.monotonic()` time, here and below.
            raw: as for `send_raw`; sent in the same system call as the message.
        Raises:
            InvalidArgumentError: the payload is larger than MAX_MESSAGE_BYTES. Nothing was sent.
            PeerUnavailableError: the connection is broken, or the peer did not read it by the deadline.
        """
        if len(payload) > MAX_MESSAGE_BYTES:
            raise InvalidArgumentError(
                f"a message of {len(payload)} bytes for {self.peer}; the maximum is {MAX_MESSAGE_BYTES}"
            )
        views = []
        for part in (_LENGTH.pack(len(payload)), payload):
            views += [memoryview(part), memoryview(_sign(self._send_key, self._num_sent, part))]
            self._num_sent += 1
        self.send_raw([*views, *raw], deadline)

    def receive(self, deadline: float) -> bytes:
        """Return the payload of the next message.

        Raises:
            PeerUnavailableError: the peer closed the connection, or no message arrived by the deadline.
            PeerAuthenticationError: the message fails authentication or is larger than MAX_MESSAGE_BYTES.
        """
        (length,) = _LENGTH.unpack(self._receive_part(_LENGTH.size, deadline))
        if length > MAX_MESSAGE_BYTES:
            raise self._refuse(f"received a message of {length} bytes; the maximum is {MAX_MESSAGE_BYTES}")
        return self._receive_part(length, deadline)

    def wait_for_more(self, timeout_s: float) -> bool:
        """Wait for data without consuming it; return False if none arrives within `timeout_s`.

        Raises:
            PeerUnavailableError: the peer closed the connection.
        """
        try:
            if timeout_s > 0:
                self._set_timeout(socket.SO_RCVTIMEO, time.monotonic() + timeout_s)
            some = self.connection.recv(1, socket.MSG_PEEK | (0 if timeout_s > 0 else socket.MSG_DONTWAIT))
        except (BlockingIOError, TimeoutError):
            return False
        except OSError as error:
            raise self._explain(error) from error
        if not some:
            raise self._hang_up()
        return True

    def send_raw(self, views: Sequence[memoryview], deadline: float) -> None:
        """Send the bytes of these views in order, without copying.

        Raises:
            PeerUnavailableError: the connection is broken, or the peer did not read them by the deadline.
        """
        self._transfer(views, deadline, socket.SO_SNDTIMEO, self.connection.sendmsg)

    def receive_raw(self, views: Sequence[memoryview], deadline: float) -> None:
        """Fill these views in order, without copying.

        Raises:
            PeerUnavailableError: the peer closed the connection, or the views are not full by the deadline.
                Their content is undefined.
        """

        def receive(batch: list[memoryview]) -> int:
            return self.connection.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]

        self._transfer(views, deadline, socket.SO_RCVTIMEO, receive)

    def is_quiet(self) -> bool:
        """Return True if the connection appears to be open and has no unread data."""
        try:
            return not self.wait_for_more(0.0)
        except PeerUnavailableError:
            return False

    def close(self) -> None:
        """Close the connection. Safe to repeat."""
        self.connection.close()

    def abort(self) -> None:
        """Shut down the connection from another thread; its user gets a PeerUnavailableError."""
        with suppress(OSError):  # already closed
            self.connection.shutdown(socket.SHUT_RDWR)

    # ---- inside ----------------------------------------------------------------------------------

    def _receive_part(self, num_bytes: int, deadline: float) -> bytes:
        """Return the next part of a message; raise the errors of `receive`."""
        part, mac = bytearray(num_bytes), bytearray(_MAC_BYTES)
        self.receive_raw([memoryview(part), memoryview(mac)], deadline)
        if not hmac.compare_digest(_sign(self._receive_key, self._num_received, part), mac):
            raise self._refuse("received a message without a valid MAC")
        self._num_received += 1
        return bytes(part)

    def _transfer(
        self,
        views: Sequence[memoryview],
        deadline: float,
        option: int,
        call: Callable[[list[memoryview]], int],
    ) -> None:
        """Pass the views to a system call, which returns a number of bytes, until all are transferred."""
        rest = [view for view in reversed(views) if len(view)]
        while rest:
            try:
                self._set_timeout(option, deadline)
                count = call(rest[-1 : -_MAX_BUFFERS - 1 : -1])
            except OSError as error:
                raise self._explain(error) from error
            if not count:
                raise self._hang_up()
            while count:
                view = rest.pop()
                if count < len(view):
                    rest.append(view[count:])
                count = max(0, count - len(view))

    def _set_timeout(self, option: int, deadline: float) -> None:
        """Set the kernel timeout of the next call to the deadline. Raises TimeoutError if it has passed.

        With a kernel timeout a blocking call returns when all bytes are transferred. With a Python timeout it
        would return, and be repeated, whenever the socket buffer has some space or some bytes.
        """
        rest = deadline - time.monotonic()
        if rest <= 0:
            raise TimeoutError
        self.connection.setsockopt(
            socket.SOL_SOCKET, option, _TIMEVAL.pack(int(rest), max(1, int(rest % 1 * 1e6)))
        )

    def _hang_up(self) -> PeerUnavailableError:
        self.close()
        return PeerUnavailableError(f"{self.peer} closed the connection")

    def _explain(self, error: OSError) -> PeerUnavailableError:
        self.close()
        if isinstance(error, TimeoutError | BlockingIOError):
            return PeerUnavailableError(f"{self.peer} did not answer in time")
        return PeerUnavailableError(f"the connection to {self.peer} is broken: {error.strerror or error}")

    def _refuse(self, why: str) -> PeerAuthenticationError:
        self.close()
        return PeerAuthenticationError(f"{self.peer}: {why}. The connection was closed")


def _sign(key: bytes, number: int, part: bytes | bytearray) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + part, "sha256")


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

    def admit(self, backend: str, caller: NodeName) -> BulkOpened:
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
        return BulkOpened(self.port, ticket, key)

    # ---- in the thread of the server -------------------------------------------------------------

    def list_sockets(self) -> list[socket.socket]:
        """Return the sockets to watch: the listening one, and those of connections without a ticket."""
        return [*self._strangers] if self._listener is None else [self._listener, *self._strangers]

    def go_on(self, readable: Sequence[socket.socket]) -> None:
        """Accept connections and read tickets; close the strangers that are late or too many.

        Args:
            readable: those of `list_sockets` with something to read. Call it each second, also with [].
        """
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
