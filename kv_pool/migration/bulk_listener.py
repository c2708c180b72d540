"""`BulkListener`: the port of a node over which its backends send bytes of blocks."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kv_pool.errors import (
    KVPoolError,
    MigrationError,
    OutOfThreadsError,
    PeerAuthenticationError,
    PeerUnavailableError,
)
from kv_pool.ids import NodeName
from kv_pool.migration.addresses import bind_listener, format_address, tune
from kv_pool.migration.channel import Channel
from kv_pool.migration.messages import BulkOpened
from kv_pool.threads import start_thread

_logger = logging.getLogger(__name__)

BulkHandler = Callable[[Channel, NodeName], None]
"""Serves one reader of a backend; called with the channel and the name of the reader's node.

The connection ends when it returns or raises a KVPoolError.
"""

_TICKET_BYTES = 16
_KEY_BYTES = 32
_OUT_OF_HANDLES_S = 0.1


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
        handlers: by backend name; called in the thread of the connection.
        port: 0 selects a free port.
        max_readers: limit of admitted readers; one more gets an error.
        max_strangers: limit of connections without a ticket; one more closes the oldest.
        ticket_s: how long a ticket is valid, and how long a connection may wait before sending one.

    `CallServer` watches the sockets and calls `go_on`. Each admitted reader gets a thread; if the system
    cannot start one, the connection is closed.

    Attributes:
        port: the port that readers are told; set it if they reach this node through a forwarded port.
    """

    def __init__(
        self,
        handlers: Mapping[str, BulkHandler],
        port: int,
        max_readers: int,
        max_strangers: int,
        ticket_s: float,
    ) -> None:
        self.port = port
        self._listen_port = port
        self._handlers = dict(handlers)
        self._max_readers = max_readers
        self._max_strangers = max_strangers
        self._ticket_s = ticket_s
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
            PeerUnavailableError: `max_readers` connections are open or admitted.
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
            if num_readers >= self._max_readers:
                raise PeerUnavailableError(
                    f"{num_readers} connections are open, which is the maximum; try again later"
                )
            self._admitted[ticket] = _Admission(key, handler, caller, now + self._ticket_s)
        return BulkOpened(self.port, ticket, key)

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
            if len(self._strangers) <= self._max_strangers and deadline > time.monotonic():
                return
            del self._strangers[oldest]
            oldest.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
            tune(connection)
            self._strangers[connection] = time.monotonic() + self._ticket_s
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
